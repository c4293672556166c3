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
        sequence, start, length = chunk
        held, end, row = sequence.blocks, start + length, len(token_ids)
        assert held is not None
        sequences.append(AttentionSequence(row, length, end, slot_runs(held, end, block_size)))
        outputs += [row + position - start for position in wanted_positions(chunk)]
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += _slots(held.blocks, start, end, block_size)
    num_rows = ops.pad_rows(len(token_ids))
    padding = [0] * (num_rows - len(token_ids))
    lists = token_ids + padding, positions + padding, slots, outputs
    tokens, placed, slot_mapping, wanted = upload_all([np.array(each, np.int32) for each in lists], device)
    return ForwardBatch(tokens, placed, slot_mapping, ops.plan_attention(sequences), wanted)


def _slots(blocks: Seq[int], start: int, end: int, block_size: int) -> list[int]:
    """Of positions ``start .. end - 1``."""
    slots: list[int] = []
    while start < end:
        index, offset = divmod(start, block_size)
        count = min(end - start, block_size - offset)
        first = blocks[index] * block_size + offset
        slots += range(first, first + count)
        start += count
    return slots


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
