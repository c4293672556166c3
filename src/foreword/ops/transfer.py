"""Numbers to the device without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int32]
Shape = tuple[int, ...]
_ALIGNMENT = 4
"""int32 elements of the 16 bytes to which each of several arrays is aligned."""


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """``values`` as a tensor on ``device``; on the CPU it shares their memory.

    To a GPU the copy is queued behind the work that is under way there: from pinned memory, which torch keeps until the
    copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload_all(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on ``device``, in one copy."""
    shapes = [array.shape for array in arrays]
    return parts(packed(arrays, shapes, device).to(device, non_blocking=True), shapes)


def packed(arrays: Sequence[Ints], shapes: Sequence[Shape], device: torch.device) -> Tensor:
    """On the host: one behind the other, each padded with zeros to its shape, which differs in the first size only."""
    starts = _starts(shapes)
    host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        host.numpy()[start : start + array.size] = array.reshape(-1)
    return host


def parts(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The arrays of a :func:`packed` tensor."""
    starts = _starts(shapes)
    return [buffer[start : start + math.prod(shape)].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def _starts(shapes: Sequence[Shape]) -> list[int]:
    """Where each begins, and where all end."""
    return [0, *accumulate(-(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes)]
