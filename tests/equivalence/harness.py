"""Runs a :class:`Decoder` directly over a KV pool: any chunking, any batch mix, any layout of the runs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from foreword.kv.pool import KVGeometry, KVPool
from foreword.model.config import ModelConfig
from foreword.model.decoder import Decoder
from foreword.model.inputs import ForwardBatch
from foreword.model.load import load_model
from foreword.ops import create_ops
from foreword.ops.protocol import AttentionSequence, Quantization, SlotRun
from support import DEVICE, fill_with_nan

BLOCK = 16


def load(
    directory: Path, dtype: torch.dtype, kernels: str = "auto", quantization: Quantization | None = None,
    num_threads: int | None = None, deterministic: bool = False,
) -> Decoder:  # fmt: skip
    """The checkpoint in ``directory``, on the CPU computing on ``num_threads``, or as many as torch uses; with Triton's
    kernels on a GPU if there is one, and only then not always ``deterministic``."""
    device = "cuda" if kernels == "triton" and DEVICE == "cuda" else "cpu"
    ops = create_ops(
        device, dtype, kernels, quantized=quantization is not None, num_threads=num_threads, block_size=BLOCK,
        deterministic=deterministic,
    )  # fmt: skip
    config = ModelConfig.from_directory(directory)
    return load_model(directory, config, dtype=dtype, ops=ops, quantization=quantization, device=device)


@dataclass
class Tracked:
    """A sequence in the pool: its blocks and how many tokens are computed."""

    blocks: list[int]
    computed: int = 0

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def runs(self, length: int) -> tuple[SlotRun, ...]:
        runs: list[SlotRun] = []
        for position in range(0, length, BLOCK):
            start, size = self.blocks[position // BLOCK] * BLOCK, min(BLOCK, length - position)
            if runs and runs[-1].start + runs[-1].length == start:
                runs[-1] = SlotRun(runs[-1].start, runs[-1].length + size)
            else:
                runs.append(SlotRun(start, size))
        return tuple(runs)


@dataclass
class Bench:
    """A decoder with a pool whose untouched slots hold NaN, so that reading a foreign slot shows."""

    decoder: Decoder
    num_blocks: int = 128
    kv_dtype: torch.dtype | None = None  # None: the decoder's
    device: torch.device = field(init=False)
    pool: KVPool = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.decoder.config
        geometry = KVGeometry(
            config.num_layers, config.num_kv_heads, config.head_dim, self.kv_dtype or self.decoder.ops.dtype
        )
        self.device = self.decoder._final_norm.device
        self.pool = KVPool(geometry, self.num_blocks, BLOCK, str(self.device))
        fill_with_nan(self.pool)
        self.free = list(range(self.num_blocks))

    def sequence(self, capacity: int, scatter: int | None = None) -> Tracked:
        """A fresh sequence in adjacent blocks, or in blocks shuffled with the seed ``scatter``."""
        if scatter is not None:
            random.Random(scatter).shuffle(self.free)
        count = -(-capacity // BLOCK)
        blocks, self.free = self.free[:count], self.free[count:]
        return Tracked(blocks)

    @torch.inference_mode()
    def step(
        self, parts: Iterable[tuple[Tracked, Sequence[int]]], outputs: Sequence[int] | None = None
    ) -> list[Tensor]:
        """One forward pass over new tokens of several sequences; per part the logits ``[tokens, vocab]``, on the
        host. Given ``outputs``, only those of these rows of the batch, ``[outputs, vocab]``."""
        ids, positions, slots, attention = [], [], [], []
        for sequence, tokens in parts:
            begin, end = sequence.computed, sequence.computed + len(tokens)
            attention.append(AttentionSequence(len(ids), len(tokens), end, sequence.runs(end)))
            ids.extend(tokens)
            positions.extend(range(begin, end))
            slots.extend(sequence.slot(position) for position in range(begin, end))
            sequence.computed = end
        ops = self.decoder.ops
        rows = ops.pad_rows(len(ids))
        padding = [0] * (rows - len(ids))
        wanted = list(range(len(ids)) if outputs is None else outputs)
        tokens_in, placed, slot_mapping, rows_out = (
            torch.tensor(each, dtype=torch.int32, device=self.device)
            for each in (ids + padding, positions + padding, slots, wanted)
        )
        batch = ForwardBatch(tokens_in, placed, slot_mapping, ops.plan_attention(attention), rows_out)
        logits = self.decoder.logits(self.decoder.forward(batch, self.pool.layers)).cpu()
        if outputs is not None:
            return [logits]
        return list(logits.split([sequence.query_len for sequence in attention]))

    def run(self, tokens: Sequence[int], chunks: Sequence[int] | None = None, scatter: int | None = None) -> Tensor:
        """Logits ``[len(tokens), vocab]`` of ``tokens``, computed in ``chunks`` (the last one takes the rest)."""
        sequence = self.sequence(len(tokens), scatter)
        logits, position = [], 0
        for size in [*(chunks or []), len(tokens)]:
            part = tokens[position : position + size]
            if part:
                logits.extend(self.step([(sequence, part)]))
            position += size
        return torch.cat(logits)
