"""Plans: every row meets all it sees exactly once and in order, and what is shared is read once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.protocol import AttentionSequence, SlotRun
from foreword.ops.triton.plan import AttentionPlan, Capacity, PlanSettings
from foreword.ops.triton.planner import SPLIT, block_tables, make_plan

BLOCK = 16
HEIGHTS = (16, 32, 64, 128)


def settings(programs: int = 1, *, group: int = 4, deterministic: bool = False, share: bool = True) -> PlanSettings:
    heights = (64,) if deterministic else HEIGHTS
    return PlanSettings(2, group, BLOCK, programs, heights, deterministic, share)


def one(start: int, queries: int, length: int, slot: int) -> AttentionSequence:
    """A sequence in slots that lie side by side."""
    return AttentionSequence(start, queries, length, (SlotRun(slot, length),))


@st.composite
def batches(draw: st.DrawFn) -> list[AttentionSequence]:
    """Sequences that begin with a part of one before them, in whole blocks, and go on in blocks of their own; each row
    of the batch is of one of them, in any order."""
    free, held = 0, []
    sequences: list[AttentionSequence] = []
    row = 0
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from(held)) if held and draw(st.booleans()) else []
        blocks = parent[: draw(st.integers(0, len(parent)))]
        own = draw(st.integers(1, 90))
        step = draw(st.sampled_from([1, 2]))  # side by side, or each by itself
        blocks = blocks + list(range(free, free + own * step, step))
        free += own * step + 1
        held.append(blocks)
        length = len(blocks) * BLOCK - draw(st.integers(0, BLOCK - 1))
        queries = min(draw(st.sampled_from([1, 1, 1, 2, 50, 400])), length - BLOCK * (len(blocks) - own))
        runs = _runs(blocks, length)
        sequences.append(AttentionSequence(row, queries, length, runs))
        row += queries
    return draw(st.permutations(sequences))


def _runs(blocks: Sequence[int], length: int) -> tuple[SlotRun, ...]:
    runs: list[SlotRun] = []
    for i, block in enumerate(blocks):
        size = min(BLOCK, length - i * BLOCK)
        if runs and sum(runs[-1]) == block * BLOCK:
            runs[-1] = SlotRun(runs[-1].start, runs[-1].length + size)
        else:
            runs.append(SlotRun(block * BLOCK, size))
    return tuple(runs)


def slots_of(sequence: AttentionSequence) -> list[int]:
    return [slot for start, length in sequence.runs for slot in range(start, start + length)]


def check(plan: AttentionPlan, sequences: Sequence[AttentionSequence], group: int, window: int | None) -> None:
    """What the kernels would do with the plan, row by row."""
    by_row = {s.query_start + i: (s, s.kv_len - s.query_len + i) for s in sequences for i in range(s.query_len)}
    rows = plan.rows.tolist()
    assert dict(rows) == {row: position for row, (_, position) in by_row.items()}
    assert len(rows) == len(by_row)
    items = [item for item in plan.items.tolist() if item[1]]
    ranges: dict[int, list[tuple[int, int, int]]] = {row: [] for row in by_row}  # part, first, end
    slots = {id(sequence): slots_of(sequence) for sequence in sequences}
    reads = {}
    for first, count, begin, end, offset, part, *_ in items:
        assert count * group <= plan.tile_rows
        assert begin % TILE == 0
        if (offset, end) not in reads:
            entries = plan.table[offset : offset - (-end // BLOCK)]
            reads[offset, end] = (entries[:, None] + torch.arange(BLOCK)).flatten()[:end].tolist()
        for i in range(count):
            row = rows[first + i][0]
            sequence, position = by_row[row]
            ranges[row].append((part if part < 0 else part + i, begin, end))
            assert reads[offset, end][begin : position + 1] == slots[id(sequence)][begin : min(end, position + 1)]
    parts = plan.part_list.tolist()
    merged = {row: parts[first : first + count] for row, first, count, _ in plan.merges.tolist() if count}
    assert sorted(part for own in merged.values() for part in own) == list(range(len(parts)))
    for row, (_, position) in by_row.items():
        pieces = sorted(ranges[row], key=lambda piece: piece[1])
        assert [piece[0] for piece in pieces] == merged.get(row, [-1])
        assert pieces[0][1] <= (0 if window is None else max(0, position - window + 1))
        assert pieces[-1][2] > position
        assert all(before[2] == after[1] for before, after in pairwise(pieces))
        if plan.split:
            assert all(begin // plan.split == (end - 1) // plan.split for _, begin, end in pieces[1:])
            assert all(end % plan.split == 0 for _, _, end in pieces[:-1])


@given(
    batches(),
    st.sampled_from([1, 20, 1000]),
    st.sampled_from([1, 4, 7, 16]),
    st.sampled_from([None, None, 1, 100, 900]),
    st.booleans(),
    st.booleans(),
)
def test_every_row_meets_all_it_sees_once(
    sequences: list[AttentionSequence], programs: int, group: int, window: int | None, deterministic: bool, share: bool
) -> None:
    chosen = settings(programs, group=group, deterministic=deterministic, share=share)
    plan = make_plan(sequences, chosen, window=window)
    check(plan, sequences, group, window)
    assert plan.tiles_read <= plan.tiles_used or window is not None
    if not share:
        assert plan.tiles_read == plan.tiles_used


@given(batches(), st.booleans())
@hypothesis_settings(max_examples=20)
def test_a_capacity_only_adds_zeros(sequences: list[AttentionSequence], deterministic: bool) -> None:
    """The same plan with room for more, whose views start where the capacity says: graphs run it again."""
    chosen = settings(100, deterministic=deterministic)
    tight = make_plan(sequences, chosen)
    sizes = [len(view) for view in (tight.items, tight.rows, tight.table, tight.merges, tight.part_list)]
    plan = make_plan(sequences, chosen, capacity=Capacity(*(size + 5 for size in sizes)))
    for name, size in zip(("items", "rows", "table", "merges", "part_list"), sizes, strict=True):
        padded = getattr(plan, name)
        assert torch.equal(padded[:size], getattr(tight, name))
        assert (padded[size:] == 0).all()
        assert len(padded) == size + 5
        assert padded.untyped_storage().data_ptr() == plan.buffer.untyped_storage().data_ptr()
        assert padded.data_ptr() % 16 == plan.buffer.data_ptr() % 16
    assert len(plan.part_list) == sizes[-1] + 5


def test_a_tree_is_read_once() -> None:
    """Two levels: 512 positions that all share, and another 256 that two of them do."""
    lengths, common = [900, 900, 600], [(0, 768), (0, 768), (0, 512)]
    sequences = []
    for i, (length, (start, shared)) in enumerate(zip(lengths, common, strict=True)):
        runs = (SlotRun(start, shared), SlotRun(1024 * (i + 1), length - shared))
        sequences.append(AttentionSequence(i, 1, length, runs))
    plan = make_plan(sequences, settings())
    items = sorted((begin, end, count) for _, count, begin, end, *_ in plan.items.tolist())
    assert items == [(0, 512, 3), (512, 600, 1), (512, 768, 2), (768, 900, 1), (768, 900, 1)]
    assert (plan.tiles_read, plan.tiles_used) == (4 + 2 + 1 + 2 + 2, 8 + 8 + 5)
    alone = make_plan(sequences, settings(share=False))
    assert (alone.tiles_read, len(alone.merges)) == (plan.tiles_used, 0)
    fixed = make_plan(sequences, settings(deterministic=True))
    assert fixed.tiles_read == plan.tiles_used  # less than a split is shared


@pytest.mark.parametrize(("shared", "own", "worth"), [(128, 172, False), (256, 172, True), (256, 8000, False)])
def test_a_short_beginning_is_not_worth_it(shared: int, own: int, worth: bool) -> None:
    """One tile that two share, or two of very many, are read by each."""
    sequences = [
        AttentionSequence(i, 1, shared + own, (SlotRun(0, shared), SlotRun(8192 * (i + 1), own))) for i in range(2)
    ]
    plan = make_plan(sequences, settings())
    assert plan.tiles_used - plan.tiles_read == worth * shared // TILE
    assert len(plan.merges) == 2 * worth


@pytest.mark.parametrize(
    ("sequences", "height"),
    [
        ([(1, 500)], 16),
        ([(1, 500)] * 64, 16),
        ([(5, 500)], 32),
        ([(1, 500), (40, 500)], 64),
        ([(400, 500)], 128),
        ([(400, 500), (1, 20)], 64),
    ],
)
def test_heights(sequences: list[tuple[int, int]], height: int) -> None:
    """Low where single rows are computed, high where a prompt fills the device."""
    batch = [one(1000 * i, queries, length, 1000 * i) for i, (queries, length) in enumerate(sequences)]
    assert make_plan(batch, settings(10)).tile_rows == height
    assert make_plan(batch, settings(10, deterministic=True)).tile_rows == 64


def test_how_finely_the_work_is_cut() -> None:
    """As many programs as the device runs at once, whatever the number of sequences; the longest begin first."""
    cut = make_plan([one(0, 1, 32768, 0)], settings(64)).items
    assert len(cut) == 32  # times two KV heads
    assert sorted(cut[:, 2].tolist()) == list(range(0, 32768, 1024))
    assert len(make_plan([one(i, 1, 8192, 8192 * i) for i in range(64)], settings(64)).items) == 64
    assert len(make_plan([one(0, 1, 300, 0)], settings(64)).items) == 2  # 256 at least
    lengths = make_plan([one(i, 1, 100 + 500 * i, 8192 * i) for i in range(4)], settings()).items
    assert (lengths[:, 3] - lengths[:, 2]).tolist() == [1600, 1100, 600, 100]


def test_splits_of_deterministic_plans() -> None:
    """Fixed borders; folded by one program where there are programs enough."""
    batch = [one(0, 1, 3000, 16)]
    assert make_plan(batch, settings(1, deterministic=True)).items[:, 2:4].tolist() == [[0, 3000]]
    cut = make_plan(batch, settings(100, deterministic=True)).items
    assert sorted(cut[:, 2:4].tolist()) == [[0, SPLIT], [SPLIT, 2 * SPLIT], [2 * SPLIT, 3000]]


def test_block_tables() -> None:
    """Runs of several blocks, and the last that is not whole."""
    batch = [AttentionSequence(0, 1, 75, (SlotRun(160, 32), SlotRun(16, 16), SlotRun(320, 27))), one(1, 1, 5, 48)]
    assert [block_tables(batch, 16).of(number).tolist() for number in range(2)] == [[160, 176, 16, 320, 336], [48]]
    assert block_tables(batch, 8).of(0).tolist() == [160, 168, 176, 184, 16, 24, 320, 328, 336, 344]


def test_a_batch_of_nothing() -> None:
    plan = make_plan([], settings())
    assert (len(plan.items), len(plan.merges), len(plan.part_list), plan.num_tokens) == (0, 0, 0, 0)


def test_what_cannot_be_planned_is_refused() -> None:
    """Each with the value that is wrong."""
    with pytest.raises(ValueError, match="75 positions has 2 runs that are no whole blocks of 16"):
        block_tables([one(0, 1, 20, 0), AttentionSequence(0, 1, 75, (SlotRun(0, 40), SlotRun(64, 35)))], 16)
    with pytest.raises(ValueError, match="75 positions has 1 runs of 64 slots"):
        block_tables([one(0, 1, 20, 0), AttentionSequence(0, 1, 75, (SlotRun(0, 64),))], 16)
    with pytest.raises(ValueError, match="64 items is beyond the capacity of 10"):
        make_plan([one(i, 1, 20, 32 * i) for i in range(64)], settings(), capacity=Capacity(items=10))
    with pytest.raises(ValueError, match="block_size 48"):
        PlanSettings(1, 1, 48, 1, HEIGHTS)
    with pytest.raises(ValueError, match="group_size 200: give 1 to 128"):
        PlanSettings(1, 200, 16, 1, HEIGHTS)
    with pytest.raises(ValueError, match="deterministic plans have one"):
        PlanSettings(1, 1, 16, 1, HEIGHTS, deterministic=True)
