"""Rotary position embedding: frequencies, and the cosines and sines of a batch's positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from foreword.model.config import RopeConfig
from foreword.ops.protocol import Rotation

if TYPE_CHECKING:
    from torch import Tensor


class RotaryTables:
    """Cosines and sines of every position, per distinct rotary embedding of a model.

    They are tables, computed once, so that a position's values cannot depend on the batch it is in.
    """

    def __init__(self, ropes: Iterable[RopeConfig | None], head_dim: int, max_positions: int, device: str) -> None:
        self.tables = {rope: _table(rope, head_dim, max_positions, device) for rope in set(ropes) if rope is not None}

    def at(self, positions: Tensor) -> dict[RopeConfig, Rotation]:
        """The rows of ``positions [N]``."""
        return {
            rope: Rotation(table.cos.index_select(0, positions), table.sin.index_select(0, positions))
            for rope, table in self.tables.items()
        }


def _table(rope: RopeConfig, head_dim: int, max_positions: int, device: str) -> Rotation:
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies(rope, head_dim))
    return Rotation(angles.cos().to(device), angles.sin().to(device))


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, ``[head_dim / 2]`` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.scaling == "default":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    # Llama 3: long wavelengths are stretched, short ones kept, those between are blended.
    turns = rope.original_max_position * plain / (2 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain
