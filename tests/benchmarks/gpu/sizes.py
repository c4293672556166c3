"""How large everything is that kernels are measured with."""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import SHAPES, Shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the kernels' benchmark.

    Attributes:
        shape: whose heads, products and norms are measured.
        batch, tokens: sequences that decode, and positions of each (G1).
        shared, tail: positions that all have in common, and each by itself (G2).
        new, cached: positions of a chunk and those before it (G3).
        rows: of products.
        copied: bytes of torch's copy; ``square``: side of the matrices that are multiplied.
        blocks: of 16 tokens, copied between the host tier and the pool.
    """

    shape: Shape
    batch: int
    tokens: int
    shared: int
    tail: int
    new: int
    cached: int
    rows: tuple[int, ...]
    copied: int
    square: int
    blocks: int


FULL = Sizes(SHAPES["8b"], 64, 8192, 16384, 128, 2048, 14336, (1, 8, 64, 512, 4096), 4 * 2**30, 8192, 1024)
SMALL = Sizes(SHAPES["tiny"], 2, 256, 256, 16, 32, 96, (1, 20), 2**20, 64, 2)
"""For rehearsals."""
BLOCK = 16
"""Tokens of a KV block."""
