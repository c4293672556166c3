"""One forward step: copies, batch, forward pass, logits of the rows that need them, samples."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from foreword.kv.pool import KVPool
from foreword.model.decoder import Decoder
from foreword.ops.protocol import Ops
from foreword.ops.transfer import upload
from foreword.runtime.batch import build_batch, slot_copies, wanted_positions
from foreword.runtime.report import entries, read_back, report
from foreword.runtime.sampler import Sample, Sampler
from foreword.scheduling.plan import Chunk, StepPlan
from foreword.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

_LOGIT_ROWS = 64  # rows of [vocabulary] logits made at once for prompt log-probabilities


class ModelRunner:
    """Runs step plans on the model. Counts forward passes in ``num_steps``."""

    def __init__(self, model: Decoder, pool: KVPool, ops: Ops, sampler: Sampler) -> None:
        self.model = model
        self.pool = pool
        self.num_steps = 0
        self.ops = ops
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[Sample]:
        """Compute ``plan``; the samples of all sequences whose next token became known."""
        size = self.pool.block_size
        if plan.copies:
            self.ops.copy_slots(self.pool.data, slot_copies(plan.copies, size))
        batch = build_batch(plan.chunks, self.ops, size, self.pool.data.device)
        counts = [len(wanted_positions(chunk)) for chunk in plan.chunks]
        hidden = self.model.forward(batch, self.pool.layers)  # [R, hidden]
        self.num_steps += 1
        last, end = [], 0
        for chunk, count in zip(plan.chunks, counts, strict=True):
            begin, end = end, end + count
            if not chunk.sequence.reads_cache:
                self._record_prompt_logprobs(chunk, hidden[begin:end])
            if chunk.is_last:
                last.append((chunk.sequence, end - 1))
        if not last:
            return []
        if len(last) < len(hidden):
            hidden = hidden[upload(np.array([row for _, row in last]), hidden.device)]
        logits = self.model.logits(hidden)  # [R, V]
        return self._sample([sequence for sequence, _ in last], logits)

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> list[Sample]:
        return self._sampler.sample(sequences, logits, self.ops)

    def _record_prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> None:
        """``hidden``: of all the chunk's tokens."""
        sequence, top = chunk.sequence, chunk.sequence.request.params.prompt_logprobs
        assert top is not None
        targets = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt)]
        reports = []
        for done in range(0, len(targets), _LOGIT_ROWS):
            part = np.array(targets[done : done + _LOGIT_ROWS], np.int32)
            rows = self.model.logits(hidden[done : done + len(part)])
            reports.append(report(rows, upload(part, rows.device), top))
        if reports:
            sequence.prompt_logprobs += entries(read_back(list(chain(*reports))))
