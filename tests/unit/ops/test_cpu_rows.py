"""The exactness rule on this machine: a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foreword.ops import create_ops, default_dtype
from foreword.ops.cpu import CpuOps
from foreword.ops.cpu.elementwise import gated_activation
from foreword.ops.cpu.linear import _cancelling, _twice, pad_rows, smallest_exact_rows
from foreword.ops.cpu.schedule import row_quantum

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), pytest.param((896, 4864), marks=pytest.mark.soak)]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _sensitive(out_features: int, in_features: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and rows whose products cancel, so that any other order of addition shows."""
    generator = torch.Generator().manual_seed(3)
    weight, order = _cancelling(torch.randn(out_features, in_features, generator=generator).to(dtype))
    half = torch.randn(rows, in_features // 2, generator=generator).to(dtype)
    return weight, _twice(half, half, in_features)[:, order].contiguous()


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)  # [out, in]
def test_linear_rows_are_equal_at_every_padded_size_and_offset(shape: tuple[int, int], dtype: torch.dtype) -> None:
    ops = CpuOps(dtype)
    weight, x = _sensitive(*shape, 640, dtype)
    product = ops.linear(weight)
    whole = product(x)
    sizes = sorted({ops.pad_rows(count) for count in range(1, 600)})
    for rows in sizes:
        assert torch.equal(product(x[:rows]), whole[:rows]), rows
        assert torch.equal(product(x[640 - rows :].contiguous()), whole[640 - rows :]), rows


@DTYPES
def test_the_measurement_finds_the_inexact_single_row(dtype: torch.dtype) -> None:
    weight, x = _sensitive(576, 1536, 48, dtype)
    product = CpuOps(dtype).linear(weight)
    smallest = smallest_exact_rows(weight)
    assert smallest in (1, 2, 4, 8, 16)
    single_is_exact = torch.equal(product(x[:1]), product(x)[:1])
    assert single_is_exact or smallest > 1


def test_padding_uses_few_sizes_and_wastes_little() -> None:
    sizes = {pad_rows(count, 2) for count in range(1, 2049)}
    assert len(sizes) <= 40
    for count in range(1, 2049):
        padded = pad_rows(count, 2)
        assert count <= padded <= max(2, 2 * count if count < 16 else count * 1.25 + 16)
        assert pad_rows(padded, 2) == padded
    assert pad_rows(1, 1) == 1
    assert pad_rows(3, 16) == 16


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_batched_products_of_attention_have_equal_rows(head_dim: int) -> None:
    quantum = row_quantum(head_dim)
    query, key = torch.randn(2, 1536, head_dim), torch.randn(2, 512, head_dim)
    weights, value = torch.rand(2, 1536, 128), torch.randn(2, 128, head_dim)
    scores, values = torch.bmm(query, key.transpose(1, 2)), torch.bmm(weights, value)
    for rows in (quantum, 2 * quantum, 16, 48, 96, 384, 1024):
        assert torch.equal(torch.bmm(query[:, :rows].contiguous(), key.transpose(1, 2)), scores[:, :rows]), rows
        assert torch.equal(torch.bmm(weights[:, :rows].contiguous(), value), values[:, :rows]), rows
    for tiles in (1, 2, 3):  # the number of tiles in one product changes no score
        part = torch.bmm(query, key[:, : 128 * tiles].transpose(1, 2))
        assert torch.equal(part, scores[..., : 128 * tiles]), tiles
    for batch in (1, 3, 8, 24, 64):  # nor does the number of products
        many = value[:1].expand(batch, -1, -1).contiguous()
        rows = weights[:1, :quantum].expand(batch, -1, -1).contiguous()
        assert torch.equal(torch.bmm(rows, many)[-1], values[0, :quantum]), batch


@DTYPES
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [64, 100, 1536, 17000])
def test_activation_rows_are_equal_wherever_they_lie(width: int, kind: str, dtype: torch.dtype, threads: int) -> None:
    gate_up = (torch.randn(41, 2 * width) * 3).to(dtype)
    whole = gated_activation(gate_up, kind)  # type: ignore[arg-type]
    assert whole.is_contiguous()
    act = F.silu(gate_up[:, :width]) if kind == "silu" else F.gelu(gate_up[:, :width], approximate="tanh")
    torch.testing.assert_close(whole, act * gate_up[:, width:])
    for low, high in ((0, 1), (5, 6), (7, 23), (0, 40), (40, 41)):
        part = gated_activation(gate_up[low:high].contiguous(), kind)  # type: ignore[arg-type]
        assert torch.equal(part, whole[low:high]), (low, high, threads)


@DTYPES
def test_norm_rows_are_equal_and_right(dtype: torch.dtype, threads: int) -> None:
    ops = CpuOps(dtype)
    x = torch.randn(700, 576).to(dtype)
    for weight in (torch.randn(576).to(dtype), torch.randn(576)):
        whole = ops.rms_norm(x, weight, 1e-5)
        assert whole.dtype == dtype
        wide = x.double()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        torch.testing.assert_close(whole, expected.to(dtype))
        for low, high in ((0, 1), (3, 5), (100, 148), (0, 512), (699, 700)):
            assert torch.equal(ops.rms_norm(x[low:high], weight, 1e-5), whole[low:high]), threads


@DTYPES
def test_rotation_is_a_rotation_of_half_split_pairs(dtype: torch.dtype) -> None:
    ops = CpuOps(dtype)
    x = torch.randn(33, 5, 24).to(dtype)
    for half in (12, 8):  # the whole head, and a part of it
        angles = torch.rand(33, half) * 6
        whole = ops.rotate(x, angles.cos(), angles.sin())
        pairs = torch.complex(x[..., :half].float(), x[..., half : 2 * half].float())
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        expected = torch.cat((turned.real, turned.imag, x[..., 2 * half :].float()), dim=-1)
        torch.testing.assert_close(whole, expected.to(dtype))
        assert torch.equal(ops.rotate(x[4:5], angles[4:5].cos(), angles[4:5].sin()), whole[4:5])


def test_backends_are_chosen_by_device() -> None:
    assert isinstance(create_ops("cpu", torch.float32), CpuOps)
    assert default_dtype("cpu") in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="tpu"):
        create_ops("tpu", torch.bfloat16)
    with pytest.raises(ValueError, match="float16"):
        create_ops("cpu", torch.float16)
