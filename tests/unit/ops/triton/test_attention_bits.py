"""Deterministic plans: the bits of a row depend on nothing but its sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from foreword.ops.protocol import AttentionSpec
from foreword.ops.triton.numeric import INTERPRETED
from interpreter import dot

from .pages import Pages, Part

PLAIN, WINDOW = AttentionSpec(0.125), AttentionSpec(0.125, window=300)
SOFTCAP = AttentionSpec(0.125, window=70, softcap=2.0)
FP32, FP16, INT8 = (torch.float32, torch.float32), (torch.float16, torch.float16), (torch.bfloat16, torch.int8)
CASES = pytest.mark.parametrize(("formats", "spec"), [(FP32, PLAIN), (FP16, WINDOW), (INT8, SOFTCAP)])
"""Each format and each kind of layer once; all pairs are left to the soak test."""
SMALL_SPLITS = pytest.mark.usefixtures("small_splits")


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits that short contexts have several of."""
    monkeypatch.setattr("foreword.ops.triton.planner.SPLIT", 256)


@pytest.fixture(autouse=True)
def _rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose rows are computed alike wherever in the tile they are, as a GPU's matrix units do: the one that
    the interpreter takes from NumPy is not such."""
    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def bits(
    pages: Pages, parts: Sequence[Part], spec: AttentionSpec, *, programs: int = 1, share: bool = False
) -> list[Tensor]:
    """The rows of each part."""
    plan = pages.plan(parts, spec, programs=programs, deterministic=True, share=share)
    rows = pages.attend(parts, spec, plan)
    assert rows.isfinite().all()
    return list(rows.split([end - begin for _, begin, end in parts]))


@SMALL_SPLITS
@CASES
def test_chunks_and_decoding(formats: tuple[torch.dtype, torch.dtype], spec: AttentionSpec) -> None:
    """A prompt at once, in chunks, and token by token."""
    pages = Pages([560], dtype=formats[0], kv_dtype=formats[1], group=3)
    (whole,) = bits(pages, [(0, 530, 560)], spec)
    for begin, end in ((530, 543), (543, 544), (544, 560), (559, 560)):
        (chunk,) = bits(pages, [(0, begin, end)], spec)
        assert torch.equal(chunk, whole[begin - 530 : end - 530])


@SMALL_SPLITS
@pytest.mark.parametrize(("spec", "merges"), [(PLAIN, 9), (WINDOW, 9), (SOFTCAP, 0)])
def test_how_the_work_is_cut(spec: AttentionSpec, merges: int) -> None:
    """One program that folds its splits, and one for each split with a merge behind them."""
    pages = Pages([700, 560])
    parts = [(0, 699, 700), (1, 552, 560)]
    folded = pages.plan(parts, spec, deterministic=True)
    cut = pages.plan(parts, spec, deterministic=True, programs=1000)
    assert (len(folded.merges), len(cut.merges)) == (0, merges)
    assert torch.equal(pages.attend(parts, spec, folded), pages.attend(parts, spec, cut))


@SMALL_SPLITS
@CASES
def test_a_shared_prefix(formats: tuple[torch.dtype, torch.dtype], spec: AttentionSpec) -> None:
    """Read once for all, and by each sequence for itself; alone, and next to others."""
    lengths = [640, 530, 300, 590]
    shared = [0, 496, 272, 528]
    pages = Pages(lengths, shared=shared, dtype=formats[0], kv_dtype=formats[1], scatter=True)
    parts = [(i, length - 1, length) for i, length in enumerate(lengths)] + [(0, 590, 600)]
    plan = pages.plan(parts, spec, deterministic=True)
    assert (plan.tiles_read < plan.tiles_used) == (spec is not SOFTCAP)  # whose window hides all that is shared
    alone = [bits(pages, [part], spec)[0] for part in parts]
    for programs, share in ((1, True), (100, True), (1, False)):
        rows = bits(pages, parts, spec, programs=programs, share=share)
        assert all(torch.equal(one, two) for one, two in zip(rows, alone, strict=True))


def test_where_blocks_lie() -> None:
    """Side by side or scattered; the rest of the pool is not finite."""
    parts = [(0, 299, 300), (1, 100, 130)]
    rows = [Pages([300, 130], dtype=torch.float16, scatter=scatter).attend(parts, PLAIN) for scatter in (False, True)]
    assert torch.equal(*rows)


def test_splits_of_real_length() -> None:
    """The same with the length that the engine uses."""
    pages = Pages([1300], group=1)
    (whole,) = bits(pages, [(0, 1290, 1300)], PLAIN)
    assert torch.equal(bits(pages, [(0, 1299, 1300)], PLAIN, programs=100)[0], whole[-1:])


@pytest.mark.soak
@SMALL_SPLITS
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("spec", [PLAIN, WINDOW, SOFTCAP])
@pytest.mark.parametrize("formats", [FP32, FP16, INT8])
def test_everything_together(
    formats: tuple[torch.dtype, torch.dtype], spec: AttentionSpec, group: int, dim: int, seed: int
) -> None:
    """Random batches against their parts one by one, and against plain attention."""
    random = torch.Generator().manual_seed(seed)
    first = int(torch.randint(530, 800, (), generator=random))
    shared = [0, *(int(x) * 16 for x in torch.randint(10, 33, (3,), generator=random))]
    own = torch.randint(1, 100, (4,), generator=random).tolist()
    lengths = [first, *(n + more for n, more in zip(shared[1:], own, strict=False))]
    options = {"dtype": formats[0], "kv_dtype": formats[1], "group": group, "dim": dim}
    pages = Pages(lengths, shared=shared, scatter=True, seed=seed, **options)
    parts = [(i, length - 1, length) for i, length in enumerate(lengths)] + [(0, first - 33, first - 1)]
    rows = bits(pages, parts, spec, programs=seed * 20 + 1, share=True)
    for part, result in zip(parts, rows, strict=True):
        assert torch.equal(bits(pages, [part], spec)[0], result)
    error = (torch.cat(rows).double() - pages.expected(parts, spec)).abs().max()
    assert error < {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[formats[0]]
