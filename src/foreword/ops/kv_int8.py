"""Keys and values in 8 bits: each row, the key or value of one token and head, symmetric with a scale of its own.

So a row depends on nothing but itself, and results depend on neither batches nor chunks nor the cache. The scale lies
behind the row's bytes, in the same slot of the pool: whatever copies, evicts or stores slots takes it along.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
"""Of a row's float32 scale."""

_SMALLEST = 1e-30
"""Rows whose largest value is no larger are zero: the inverse of their scale would not be finite."""


def scale_width(dtype: torch.dtype) -> int:
    """Elements behind those of a row of KV in ``dtype``."""
    return SCALE_BYTES if dtype == torch.int8 else 0


def quantize_rows(rows: Tensor) -> Tensor:
    """``[.., D]`` float to ``[.., D + SCALE_BYTES]`` int8: the values, to the nearest and ties to even, and the scale.

    A row that holds a value that is not finite has the scale NaN.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    values = torch.where(largest > _SMALLEST, 127 / largest, 0.0).mul(rows).round_().nan_to_num_(0.0)
    scale = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return torch.cat((values.to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantize_rows(rows: Tensor) -> Tensor:
    """``[.., D + SCALE_BYTES]`` int8 to ``[.., D]`` float32."""
    return rows[..., :-SCALE_BYTES].float() * rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
