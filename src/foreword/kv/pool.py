"""The KV tensors."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foreword.ops.kv_int8 import scale_width
from foreword.ops.protocol import KVLayer

if TYPE_CHECKING:
    from torch import Tensor


_PORTABLE, _MAPPED = 1, 2
"""Flags of ``cudaHostRegister``: for all contexts, and with an address on the device."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one token's KV.

    Attributes:
        dtype: of the pool; int8 comes with a scale for each head, float8_e4m3fn (which GPUs compute alone) without.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.row_width * self.dtype.itemsize

    @property
    def row_width(self) -> int:
        """Elements of one head's key or value, the scale included."""
        return self.head_dim + scale_width(self.dtype)


class KVPool:
    """Keys and values of all layers, head-major: ``[num_layers, 2, num_kv_heads, num_slots, row_width]``.

    Block ``b`` owns the slots ``b * block_size .. (b + 1) * block_size - 1``. Memory is touched, and so
    resident, only where a block has been written.

    Args:
        pinned: memory of the CPU, all of it resident and held in place, so that a GPU reads and writes it.

    Raises:
        RuntimeError, OSError, ValueError: there is not so much memory.
    """

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, block_size: int, device: str = "cpu", *, pinned: bool = False
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (geometry.num_layers, 2, geometry.num_kv_heads, num_blocks * block_size, geometry.row_width)
        self.data: Tensor = (
            _lazy_zeros(shape, geometry.dtype)
            if device == "cpu"
            else torch.zeros(shape, dtype=geometry.dtype, device=device)
        )
        if pinned:
            self._pin()
        self.layers = [KVLayer(layer[0], layer[1]) for layer in self.data]

    def block(self, number: int) -> Tensor:
        """``[num_layers, 2, num_kv_heads, block_size, row_width]``: the part of the pool that is one block."""
        return self.data[:, :, :, number * self.block_size : (number + 1) * self.block_size]

    def _pin(self) -> None:
        """In place: memory that torch pins takes the next power of two."""
        driver, place = torch.cuda.cudart(), self.data.data_ptr()
        torch.cuda.check_error(driver.cudaHostRegister(place, self.data.nbytes, _PORTABLE | _MAPPED))
        weakref.finalize(self, driver.cudaHostUnregister, place).atexit = False  # the process's end does it too


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system hands out on first write (``torch.zeros`` writes them all).

    Mapped by hand because NumPy asks for huge pages: every layer and head has its own part of the pool, and the first
    token would touch a huge page in each, hundreds of megabytes.
    """
    import mmap

    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
