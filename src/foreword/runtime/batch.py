"""From a step plan to tensors: the one place where sequences become a flat batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from foreword.model.inputs import ForwardBatch
from foreword.ops.protocol import AttentionSequence, Ops, SlotCopy, SlotRun
from foreword.ops.transfer import upload_all
from foreword.scheduling.plan import Chunk

if TYPE_CHECKING:
    import torch

    from foreword.kv.table import BlockCopy, BlockTable


def build_batch(chunks: Seq[Chunk], ops: Ops, block_size: int, device: torch.device) -> ForwardBatch:
    """All chunks side by side, padded to the row count the backend wants."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequences: list[AttentionSequence] = []
    outputs: list[int] = []
    for chunk in chunks:
        held = chunk.sequence.blocks
        assert held is not None
        sequences.append(
            AttentionSequence(len(token_ids), chunk.length, chunk.end, slot_runs(held, chunk.end, block_size))
        )
        outputs += (len(token_ids) + p - chunk.start for p in wanted_positions(chunk))
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        slots += (held.blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.end))
    num_rows = ops.pad_rows(len(token_ids))
    padding = [0] * (num_rows - len(token_ids))
    lists = token_ids + padding, positions + padding, slots, outputs
    tokens, placed, slot_mapping, wanted = upload_all([np.array(each, np.int32) for each in lists], device)
    return ForwardBatch(tokens, placed, slot_mapping, ops.plan_attention(sequences), wanted)


def wanted_positions(chunk: Chunk) -> range:
    """The positions of a chunk whose hidden states are needed: of its last token if a token follows, of all for prompt
    log-probabilities."""
    return range(chunk.end - chunk.is_last if chunk.sequence.reads_cache else chunk.start, chunk.end)


def slot_runs(held: BlockTable, num_tokens: int, block_size: int) -> tuple[SlotRun, ...]:
    """Where the KV of the first ``num_tokens`` lies, as runs of slots."""
    runs, left = [], num_tokens
    for first_block, count in held.runs:
        if left <= 0:
            break
        runs.append(SlotRun(first_block * block_size, min(left, count * block_size)))
        left -= count * block_size
    return tuple(runs)


def slot_copies(copies: Seq[BlockCopy], block_size: int) -> list[SlotCopy]:
    """Block copies as slot copies."""
    return [SlotCopy(c.source * block_size, c.target * block_size, c.num_tokens) for c in copies]
