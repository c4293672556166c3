"""Paged attention against plain attention in double precision.

Under Triton's interpreter, bfloat16 is tested with the kernels' arithmetic in float32: its own there is wrong. Its
conversion to bfloat16 cuts instead of rounding, for which the tolerance allows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foreword.ops.protocol import AttentionSpec, KVLayer
from foreword.ops.triton.attention import attend

from .pages import DEVICE, Pages, Part

SPEC = AttentionSpec(0.125)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 1.6e-2}
PARTS = [(0, 129, 130), (1, 65, 70), (2, 32, 33)]
"""Two that decode and a chunk of a prompt; more and less than a tile, none of whole blocks."""
LENGTHS = [130, 70, 33]
KV = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
]


def check(pages: Pages, parts: list[Part], spec: AttentionSpec, result: Tensor, **options: Tensor) -> None:
    expected = pages.expected(parts, spec, **options)
    assert result.dtype == pages.dtype
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[pages.dtype]


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "kv_dtype"), KV)
def test_formats_and_head_sizes(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int) -> None:
    """Every format of KV with every usual head size, in scattered blocks."""
    pages = Pages(LENGTHS, dtype=dtype, kv_dtype=kv_dtype, dim=dim, scatter=True)
    check(pages, PARTS, SPEC, pages.attend(PARTS, SPEC))


@pytest.mark.parametrize("group", [1, 2, 3, 6, 7, 8, 16])
def test_groups(group: int) -> None:
    """Query heads per KV head, also those that fill no tile exactly, with two KV heads."""
    pages = Pages(LENGTHS, group=group, kv_heads=2)
    check(pages, PARTS, SPEC, pages.attend(PARTS, SPEC))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("spec", "alibi"),
    [
        (AttentionSpec(0.125, window=1), False),
        (AttentionSpec(0.125, window=70), False),
        (AttentionSpec(0.125, window=1000), False),
        (AttentionSpec(0.3, softcap=1.5), False),
        (AttentionSpec(0.3, window=100, softcap=3.0), False),
        (AttentionSpec(0.125), True),
        (AttentionSpec(0.125, window=70), True),
    ],
)
def test_what_a_layer_may_ask(spec: AttentionSpec, alibi: bool, deterministic: bool) -> None:
    """Window, soft-cap and ALiBi; the window ends within, before and at the border of a tile."""
    pages = Pages([300, 150], scatter=True)
    parts = [(0, 299, 300), (1, 140, 150)]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE) if alibi else None
    plan = pages.plan(parts, spec, deterministic=deterministic)
    options = {} if slopes is None else {"slopes": slopes}
    check(pages, parts, spec, pages.attend(parts, spec, plan, slopes), **options)


@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(0.125, window=400)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_splits(dtype: torch.dtype, spec: AttentionSpec) -> None:
    """A long context in parts, for a device with room for many programs."""
    pages = Pages([900, 100], dtype=dtype)
    parts = [(0, 899, 900), (1, 96, 100)]
    plan = pages.plan(parts, spec, programs=100)
    assert plan.merges[:, 2].tolist() == ([3] if spec.window else [4])
    check(pages, parts, spec, pages.attend(parts, spec, plan))


@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(0.125, window=300, softcap=4.0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_shared_prefix(deterministic: bool, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of two levels, and one that shares nothing; a prompt beside them."""
    monkeypatch.setattr("foreword.ops.triton.planner.SPLIT", 256)
    lengths = [600, 530, 300, 590, 40]
    pages = Pages(lengths, shared=[0, 512, 256, 512, 0], scatter=True)
    parts = [(i, length - 1, length) for i, length in enumerate(lengths)] + [(4, 20, 39)]
    plan = pages.plan(parts, spec, deterministic=deterministic)
    assert plan.tiles_read < plan.tiles_used
    check(pages, parts, spec, pages.attend(parts, spec, plan))


def test_a_part_of_a_wider_tensor() -> None:
    """Queries may be a part of the rows that a layer's product gives."""
    pages = Pages([70])
    parts = [(0, 60, 70)]
    wide = torch.cat((pages.queries[0][60:70], torch.full((10, 3, 64), torch.nan)), dim=1).to(DEVICE)
    result = attend(wide[:, :4], pages.layer, pages.plan(parts, SPEC), SPEC)
    check(pages, parts, SPEC, result.cpu())


def test_nothing_to_do() -> None:
    """A batch of padding alone."""
    pages = Pages([16])
    query = torch.full((3, 4, 64), torch.nan, device=DEVICE)
    assert (attend(query, pages.layer, pages.plan([], SPEC), SPEC) == 0).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
def test_a_query_that_is_not_a_number_stays_alone() -> None:
    """Its row is not a number, those stacked with it are as without it."""
    pages = Pages([70])
    parts = [(0, 60, 70)]
    clean = pages.attend(parts, SPEC)
    pages.queries[0][63, 2] = torch.nan
    result = pages.attend(parts, SPEC)
    assert result[3, 2].isnan().all()
    result[3, 2] = clean[3, 2]
    assert torch.equal(result, clean)


def test_what_does_not_fit_is_refused() -> None:
    """Each with the value that is wrong."""
    pages = Pages([20])
    plan = pages.plan([(0, 19, 20)], SPEC)
    query = torch.zeros(1, 4, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"the query is torch.float16 and the KV torch.float32"):
        attend(query.half(), pages.layer, plan, SPEC)
    with pytest.raises(ValueError, match="must have 32 elements, not 64"):
        attend(query[..., :32], pages.layer, plan, SPEC)
    with pytest.raises(ValueError, match="strides"):
        attend(torch.zeros(1, 8, 64, device=DEVICE)[:, ::2], pages.layer, plan, SPEC)
    with pytest.raises(ValueError, match=r"torch.int16 is not supported"):
        attend(query, KVLayer(*(x.to(torch.int16) for x in pages.layer)), plan, SPEC)
