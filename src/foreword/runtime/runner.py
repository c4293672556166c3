"""One forward step: copies, batch, forward pass, logits of the rows that need them, samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foreword.core.outputs import TokenLogprobs
from foreword.kv.pool import KVPool
from foreword.model.decoder import Decoder
from foreword.ops.protocol import Ops
from foreword.runtime.batch import build_batch, slot_copies, wanted_positions
from foreword.runtime.sampler import Sampler, is_plain_greedy, logprobs
from foreword.scheduling.plan import Chunk, StepPlan
from foreword.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

_LOGIT_ROWS = 64  # rows of [vocabulary] logits made at once for prompt log-probabilities


@dataclass(frozen=True, slots=True)
class Sample:
    """A token chosen for completion ``index`` behind ``sequence``, or the reason why none could be."""

    sequence: Sequence
    index: int
    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None


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
        batch = build_batch(plan.chunks, self.ops, size)
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
            (rows,) = self.ops.upload([row for _, row in last])
            hidden = hidden.index_select(0, rows)
        logits = self.model.logits(hidden)  # [R, V]
        return self._sample([sequence for sequence, _ in last], logits)

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> list[Sample]:
        best = self.ops.argmax(logits)  # of all rows at once: what greedy requests take as it is
        samples = []
        for number, (sequence, token) in enumerate(zip(sequences, best, strict=True)):
            if token is not None and is_plain_greedy(sequence):
                samples.append(Sample(sequence, sequence.index, token))
                continue
            first = sequence.index
            for index in range(first, first + sequence.num_samples):
                samples.append(self._sample_one(sequence, index, logits[number]))
        return samples

    def _sample_one(self, sequence: Sequence, index: int, row: Tensor) -> Sample:
        top = sequence.request.params.logprobs
        try:
            token = self._sampler.sample(row, sequence, index)
            return Sample(sequence, index, token, None if top is None else logprobs(row, token, top))
        except Exception as error:  # one request's trouble is not its neighbours'
            return Sample(sequence, index, error=error)

    def _record_prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> None:
        """``hidden``: of all the chunk's tokens."""
        sequence, top = chunk.sequence, chunk.sequence.request.params.prompt_logprobs
        assert top is not None
        targets = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt)]
        for done in range(0, len(targets), _LOGIT_ROWS):
            part = targets[done : done + _LOGIT_ROWS]
            rows = self.model.logits(hidden[done : done + len(part)])
            sequence.prompt_logprobs += [logprobs(row, t, top) for row, t in zip(rows, part, strict=True)]
