"""Norms, activations, rotation and argmax against double precision, and bit for bit whatever rows are beside.

Under Triton's interpreter what is converted to bfloat16 is cut instead of rounded: it may differ in the last place.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foreword.ops.cpu import elementwise
from foreword.ops.protocol import Activation, Rotation
from foreword.ops.triton.activation import gated_activation
from foreword.ops.triton.backend import rotate_heads
from foreword.ops.triton.norms import add_rms_norm, norm_heads, rms_norm
from foreword.ops.triton.numeric import INTERPRETED
from foreword.ops.triton.sampling import BLOCK, argmax

from .pages import DEVICE

EPS = 1e-5
LAST_PLACE = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", LAST_PLACE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def close(result: Tensor, expected: Tensor) -> bool:
    """To the last place of the result's dtype."""
    bound = LAST_PLACE[result.dtype] * expected.double().abs() + 1e-6
    return bool(((result.cpu().double() - expected.double()).abs() <= bound).all())


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


@DTYPES
@pytest.mark.parametrize("width", [16, 100, 576, 4096])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    """Also where the weight has another dtype; each row alone has the bits that it has among others."""
    torch.manual_seed(0)
    x = (3 * torch.randn(19, width)).to(dtype)
    x[7] *= 100
    for weight in (torch.randn(width).to(dtype), torch.randn(width)):
        result = rms_norm(x.to(DEVICE), weight.to(DEVICE), EPS)
        assert result.dtype == dtype
        assert close(result, normed(x, weight))
        for rows in (slice(18, 19), slice(5, 8), slice(7, 7)):
            assert torch.equal(rms_norm(x[rows].to(DEVICE), weight.to(DEVICE), EPS), result[rows])


@DTYPES
def test_residual_and_norm(dtype: torch.dtype) -> None:
    """The bits of the addition, in the dtype, and the norm of its result."""
    torch.manual_seed(0)
    x, residual = (torch.randn(7, 200).to(dtype).to(DEVICE) for _ in range(2))
    weight = torch.randn(96).to(dtype).to(DEVICE)
    total, result = add_rms_norm(x[:, :96], residual[:, 100:196], weight, EPS)
    assert torch.equal(result, rms_norm(total, weight, EPS))
    if INTERPRETED and dtype == torch.bfloat16:
        assert close(total, (x[:, :96].double() + residual[:, 100:196].double()))
    else:
        assert torch.equal(total, x[:, :96] + residual[:, 100:196])


@DTYPES
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_norm_of_heads(dtype: torch.dtype, dim: int) -> None:
    """Queries and keys in place, each with its weight; values stay; the same bits by the norm of either."""
    torch.manual_seed(0)
    qkv = torch.randn(9, 5 + 2 * 2, dim).to(dtype).to(DEVICE)
    weights = torch.randn(2, dim).to(dtype).to(DEVICE)
    before = qkv.clone()
    norm_heads(qkv[:, :7], 5, weights[0], weights[1], EPS)
    assert close(qkv[:, :5], normed(before[:, :5].cpu(), weights[0].cpu()))
    assert torch.equal(qkv[:, :5], rms_norm(before[:, :5], weights[0], EPS))
    assert torch.equal(qkv[:, 5:7], rms_norm(before[:, 5:7], weights[1], EPS))
    assert torch.equal(qkv[:, 7:], before[:, 7:])


def test_rows_that_cannot_be_read_are_refused() -> None:
    """Heads that do not lie side by side, elements that do not, and a residual of another shape."""
    x, weight = torch.zeros(4, 6, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    with pytest.raises(ValueError, match="side by side"):
        rms_norm(x[:, ::2], weight, EPS)
    with pytest.raises(ValueError, match="side by side"):
        rms_norm(x[0].t(), torch.ones(6, device=DEVICE), EPS)
    with pytest.raises(ValueError, match=r"as many as in \(6, 16\)"):
        add_rms_norm(x[0], x[0, :4], weight, EPS)


@DTYPES
@pytest.mark.filterwarnings("ignore:overflow encountered")  # to infinity, as it should
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [48, 1100])
def test_activation(dtype: torch.dtype, kind: Activation, width: int) -> None:
    """With and without a bias, and where exponentials leave the range of float32."""
    torch.manual_seed(0)
    gate_up, bias = (3 * torch.randn(5, 2 * width)).to(dtype), torch.randn(2 * width).to(dtype)
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, 30.0])
    for shift in (None, bias):
        sums = gate_up.double() + (0 if shift is None else shift.double())
        gate, up = sums[:, :width], sums[:, width:]
        expected = (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up
        given = None if shift is None else shift.to(DEVICE)
        result = gated_activation(gate_up.to(DEVICE), kind, given)
        assert close(result, expected)
        assert torch.equal(gated_activation(gate_up[3:4].to(DEVICE), kind, given), result[3:4])


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'relu' is not supported; give one of"):
        gated_activation(torch.zeros(1, 4, device=DEVICE), "relu")  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 16)])
def test_rotation(dtype: torch.dtype, dim: int, half: int) -> None:
    """Of whole heads and of a part; as the CPU's."""
    torch.manual_seed(0)
    x, angles = torch.randn(9, 3, dim).to(dtype), 6 * torch.rand(9, half)
    rotation = Rotation(angles.cos(), angles.sin())
    result = x.to(DEVICE).clone()
    rotate_heads(result, Rotation(*(part.to(DEVICE) for part in rotation)))
    assert close(result, elementwise.rotate(x.float(), *rotation))


def test_argmax() -> None:
    """The first of equals, in one part and across parts; none where a NaN is or the largest is infinite."""
    torch.manual_seed(0)
    logits = torch.randn(8, 2 * BLOCK + 77)
    logits[0, [5, 900, BLOCK + 3]] = 9.0
    logits[1, [BLOCK, 2 * BLOCK + 76]] = 9.0
    logits[2, 2 * BLOCK + 76] = 9.0
    logits[3, 100], logits[3, 2 * BLOCK + 3] = math.nan, 9.0
    logits[4, BLOCK + 8] = math.inf
    logits[5] = -math.inf
    logits[6] = -1e30
    logits[6, 3] = -math.inf
    expected = [5, BLOCK, 2 * BLOCK + 76, -1, -1, -1, 0, int(logits[7].argmax())]
    assert argmax(logits.to(DEVICE)).tolist() == expected
    wide = torch.cat((logits, logits), dim=1).to(DEVICE)
    assert argmax(wide[2:, : logits.shape[1]]).tolist() == expected[2:]
    assert argmax(logits[:0].to(DEVICE)).tolist() == []
    assert argmax(torch.tensor([[3.0]], device=DEVICE)).tolist() == [0]
