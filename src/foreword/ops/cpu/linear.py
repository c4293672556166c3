"""Linear layers on the CPU: weights packed once for oneDNN, rows bit-equal at every batch size.

Which row counts give the same bits as a large batch is a property of the library and the processor (fp32 kernels take
other paths for one to nine rows), so it is measured for every weight shape when it is packed, not assumed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.protocol import LinearOp

ROW_QUANTUM = 16
"""Row counts that are multiples of this gave equal rows on every path tried."""

_SMALL_ROWS = (1, 2, 4, 8)
_REFERENCE_ROWS = 3 * ROW_QUANTUM


@cache
def mkldnn_packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor run prepacked oneDNN linears in ``dtype``."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        product = _packed(torch.ones(16, 16, dtype=dtype), None)
        return bool(torch.equal(product(torch.ones(1, 16, dtype=dtype)), torch.full((1, 16), 16.0, dtype=dtype)))
    except (AttributeError, RuntimeError):
        return False


def pack_linear(weight: Tensor, bias: Tensor | None) -> LinearOp:
    """``x [N, in] -> [N, out]`` for ``weight [out, in]`` and ``bias [out]``."""
    if mkldnn_packs(weight.dtype):
        return _packed(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> LinearOp:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")


def smallest_exact_rows(weight: Tensor) -> int:
    """The smallest power of two from which on row counts give the bits of a larger batch; 16 if no smaller one does.

    Measured on a product of the weight's shape whose exact results are zero: what is left is the rounding error, so
    that another order of addition shows in nearly every element, also through the rounding to bfloat16. (On random
    data it shows in one of 10,000: oneDNN's path for a single row of more than 1,024 inputs was long taken for exact.)
    """
    cancelling, order = _cancelling(weight)
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(_REFERENCE_ROWS, weight.shape[1] // 2, generator=generator).to(weight.dtype)
    x = _twice(half, half, weight.shape[1])[:, order].contiguous()
    product = pack_linear(cancelling, None)
    reference = product(x)
    smallest = ROW_QUANTUM
    for rows in reversed(_SMALL_ROWS):
        if not torch.equal(product(x[:rows]), reference[:rows]):
            break
        smallest = rows
    return smallest


def _cancelling(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` with the second half of its inputs the first half negated, shuffled; and the order."""
    half = weight[:, : weight.shape[1] // 2]
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    return _twice(half, -half, weight.shape[1])[:, order], order


def _twice(first: Tensor, second: Tensor, width: int) -> Tensor:
    return F.pad(torch.cat((first, second), dim=1), (0, width - 2 * first.shape[1]))


def pad_rows(num_rows: int, smallest: int) -> int:
    """``num_rows`` rounded up to one of a few sizes: oneDNN builds a kernel for every new size, 0.5 to 1 ms each."""
    if num_rows < ROW_QUANTUM:
        return max(smallest, 1 << max(num_rows - 1, 0).bit_length())
    step = ROW_QUANTUM
    while num_rows > 8 * step and step < 128:
        step *= 2
    return -(-num_rows // step) * step
