"""Unpacking the tensors of a GGUF file with torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreword.ops.quantize import GROUP, half_at, nibbles, unpack_q4_1, unpack_q8_0


def unpack(tensor: Any) -> Tensor:
    """The weights of a ``gguf.ReaderTensor`` in float32, in the shape PyTorch gives them.

    Raises:
        NotImplementedError: a format that neither this module nor the ``gguf`` package can unpack.
    """
    shape = [int(size) for size in reversed(tensor.shape)]
    kind = tensor.tensor_type.name
    if kind in ("F32", "F16"):
        return torch.from_numpy(tensor.data.copy()).float().reshape(shape)
    if kind == "BF16":
        return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).float().reshape(shape)
    if kind in _UNPACKERS:
        size, unpacker = _UNPACKERS[kind]
        blocks = torch.from_numpy(tensor.data.copy()).reshape(-1, size)  # [blocks, bytes of a block]
        return unpacker(blocks).reshape(shape)
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)


def _fifth_bits(packed: Tensor) -> Tensor:
    """``[blocks, 4]`` bytes to ``[blocks, 32]``: bit i of the block as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (packed[:, :, None] >> shifts) & 1  # [blocks, 4, 8]
    return bits.reshape(-1, GROUP) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    """Bytes of a block: scale (2), values (16)."""
    return half_at(blocks, 0) * (nibbles(blocks[:, 2:]).float() - 8)


def _q5_0(blocks: Tensor) -> Tensor:
    """Bytes of a block: scale (2), fifth bits (4), values (16)."""
    return half_at(blocks, 0) * ((nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    """Bytes of a block: scale (2), minimum (2), fifth bits (4), values (16)."""
    return half_at(blocks, 0) * (nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).float() + half_at(blocks, 2)


_UNPACKERS = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, unpack_q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, unpack_q8_0),
}
