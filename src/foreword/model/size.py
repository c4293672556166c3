"""How much memory a checkpoint's weights will take, by the heads of its files alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foreword.core.errors import ModelLoadError
from foreword.model.digest import weight_files
from foreword.model.gguf import BLOCK_SUFFIXES
from foreword.ops.quantize import BLOCK_BYTES, GROUP

if TYPE_CHECKING:
    import torch

    from foreword.ops.protocol import Quantization

_STORED_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Of safetensors' types; the others take one byte at most."""
_CONVERTED = ("F64", "F32", "F16", "BF16")
"""Those that become the dtype that is computed in; the others are kept as they are."""


class WeightBytes(NamedTuple):
    """Bytes of the matrices that products are made with, and of everything else, embeddings above all."""

    linear: int
    other: int


def weight_bytes(
    directory: Path, dtype: torch.dtype, quantization: Quantization | None, as_stored: bool = True
) -> WeightBytes:
    """An estimate for the checkpoint in ``directory``, with what is not quantised in ``dtype``.

    Args:
        as_stored: what the checkpoint has in fewer bits stays so; else it becomes numbers like the others.

    Raises:
        ModelLoadError: a file is missing or unreadable.
    """
    linear = other = embedding = 0
    names = set[str]()
    head: Quantization | None = None if quantization is None else "int8"
    for file in weight_files(Path(directory)):
        for name, stored, shape in _tensors(file):
            if name.endswith(tuple(BLOCK_SUFFIXES.values())):  # instead of the weight of that name
                continue
            names.add(name)
            if "embed_tokens" in name:
                embedding = math.prod(shape)
                other += embedding * dtype.itemsize
            elif len(shape) == 2:
                wanted = head if name == "lm_head.weight" else quantization
                linear += (
                    _size(stored, shape, dtype, wanted) if as_stored else _size_of_values(name, shape, dtype, wanted)
                )
            else:
                other += _size(stored, shape, dtype, None)
    if head and "lm_head.weight" not in names:  # it is made from the embedding
        linear += embedding // GROUP * BLOCK_BYTES[head]
    return WeightBytes(linear, other)


def _size(stored: str, shape: list[int], dtype: torch.dtype, quantization: Quantization | None) -> int:
    count = math.prod(shape)
    if stored not in _CONVERTED:
        return count * _STORED_BYTES.get(stored, 1)
    if quantization is None or shape[-1] % GROUP:
        return count * dtype.itemsize
    return count // GROUP * BLOCK_BYTES[quantization]


def _size_of_values(name: str, shape: list[int], dtype: torch.dtype, quantization: Quantization | None) -> int:
    """Of the numbers that a tensor stands for; a word of a 4-bit weight has eight."""
    if name.endswith(".qweight"):
        shape = [shape[0], 8 * shape[1]]
    elif not name.endswith(".weight"):  # scales and zero points
        return 0
    return _size("F16", shape, dtype, quantization)


def _tensors(file: Path) -> list[tuple[str, str, list[int]]]:
    """Name, type and shape of each."""
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            slices = [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118 - not a mapping
            return [(name, part.get_dtype(), part.get_shape()) for name, part in slices]
    except Exception as error:  # safetensors raises its own type, OSError and others
        raise ModelLoadError(f"{file}: no complete safetensors file: {error}") from error
