"""Drawn tokens against double precision that sorts, and the same whatever rows are beside and wherever rows are split.

Where a row is cut is compared as such: which tokens stay says more than those that some numbers happen to draw.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foreword.ops.protocol import Draw
from foreword.ops.triton import sampling
from foreword.ops.triton.numeric import INTERPRETED
from foreword.ops.triton.sampling import Drawing, argmax, draw

from .pages import DEVICE

V = 150
BLOCK = 256 if INTERPRETED else sampling.BLOCK
NEARLY_1 = 1 - 2**-53


@pytest.fixture(autouse=True)
def _without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the time goes to checks of integers for overflow."""
    if INTERPRETED:
        from triton.runtime import interpreter

        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def ranked_and_cut(row: Tensor, how: Draw) -> tuple[dict[int, float], set[int]]:
    """Every token's weight, and the tokens that top-k and top-p leave."""
    logits = row.double().tolist()
    weights = {token: math.exp((logit - max(logits)) / how.temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: (-logits[token], token))[: how.top_k or None]
    total, before, kept = math.fsum(weights[token] for token in ranked), 0.0, set()
    for token in ranked:
        if before < how.top_p * total or not kept:
            kept.add(token)
        before += weights[token]
    return weights, kept


def expected(row: Tensor, how: Draw) -> int:
    """The token at which the kept ones' weights, in ascending order of tokens, pass ``u`` of their sum."""
    weights, kept = ranked_and_cut(row, how)
    sums = np.cumsum([weights[token] * (token in kept and weights[token] >= how.min_p) for token in weights])
    return int(np.searchsorted(sums, how.u * sums[-1], side="right"))


def left_by(row: Tensor, cut: list[int]) -> set[int]:
    """The tokens that a cut leaves."""
    key, number = cut
    bits = np.array([key if key >= 2**31 else key ^ 0x7FFFFFFF], np.uint32)
    last = bits.view(np.float32)[0]
    ties = [token for token, logit in enumerate(row.tolist()) if logit == last]
    return {token for token, logit in enumerate(row.tolist()) if logit > last} | set(ties[:number])


def check(logits: Tensor, draws: list[Draw], block: int = BLOCK) -> None:
    drawing = Drawing(logits.to(DEVICE), argmax(logits.to(DEVICE), block), draws, block)
    drawing.run()
    for row, how, token, cut in zip(logits, draws, drawing.best.tolist(), drawing.cut.tolist(), strict=True):
        possible = {other for other, logit in enumerate(row.tolist()) if logit > -math.inf}
        assert left_by(row, cut) & possible == ranked_and_cut(row, how)[1] & possible, how
        assert token == expected(row, how), how


RANDOM = [
    [Draw(0.7, u=0.3), Draw(3.0, u=0.9999), Draw(min_p=0.2, temperature=1.5, u=0.8), Draw(1.0, min_p=1.0, u=0.5)],
    [Draw(1.0, top_k=1, u=0.9), Draw(2.0, top_k=5, u=NEARLY_1), Draw(1.0, top_k=500, u=0.0)],
    [Draw(0.8, top_p=0.9, u=0.6), Draw(2.5, top_p=0.5, u=0.97), Draw(1.0, top_p=1e-9, u=0.5)],
    [Draw(1.0, 10, 0.7, u=0.7), Draw(1.5, 0, 0.8, 0.1, NEARLY_1), Draw(0.8, 30, 0.95, 0.02, 0.01)],
]


@pytest.mark.parametrize("draws", RANDOM, ids=["min_p", "top_k", "top_p", "all"])
def test_random_rows(draws: list[Draw]) -> None:
    torch.manual_seed(len(draws))
    check(3 * torch.randn(len(draws), V), draws)


def test_equal_logits() -> None:
    """Of tokens that are equally likely the first stay, and as many as there should: across parts of a row, too."""
    torch.manual_seed(0)
    coarse = torch.randn(V).round()
    zeros = torch.where(torch.arange(V) % 2 == 0, 0.0, -0.0)
    rows = torch.stack([coarse, coarse - 50, torch.full((V,), 7.5), zeros])
    draws = [Draw(1.0, 20, u=0.99), Draw(1.0, 0, 0.6, u=0.5), Draw(1.0, 140, 0.95, u=NEARLY_1)]
    check(rows, [*draws, Draw(1.0, 3, u=NEARLY_1)], block=128)


def test_rows_with_little_to_choose_from() -> None:
    """Tokens at minus infinity are never drawn, not even where u is nearly 1; nor are any below 2**-44 of the most
    likely; whatever the sign of the logits and however far apart they are."""
    rows = torch.full((3, V), -math.inf)
    rows[0, [3, 70, V - 2]] = torch.tensor([-1.0, 0.5, -3.0])
    rows[1, [0, 9]] = -1e30
    rows[2] = torch.linspace(-1e30, 1e30, V)
    check(rows, [Draw(1.0, 10, u=NEARLY_1), Draw(1.0, 5, 0.99, u=NEARLY_1), Draw(9.0, 3, u=0.0)])
    check(torch.tensor([[-3.0]]), [Draw(1.0, 0, 0.5, 0.5, 0.5)])


def test_rows_by_themselves() -> None:
    """Greedy rows and rows without a token among others, and each row alone, in another order and split otherwise: the
    same tokens."""
    torch.manual_seed(2)
    logits = 2 * torch.randn(5, V)
    logits[3, 7] = math.nan
    draws = [Draw(1.0, 0, 0.9, u=0.4), Draw(), Draw(0.7, u=0.7), Draw(1.0, u=0.5), Draw(1.0, 0, 0.5, u=0.2)]
    wide = torch.cat((logits, logits), dim=1).to(DEVICE)
    together = draw(wide[:, :V], draws, 128).tolist()
    assert together[1] == int(logits[1].argmax())
    assert together[3] == -1
    for rows in ([2], [4, 0]):
        alone = draw(logits[rows].to(DEVICE), [draws[row] for row in rows], BLOCK)
        assert alone.tolist() == [together[row] for row in rows]


def test_sums_beyond_double_precision() -> None:
    """Of weights that add up to more than 2**53: a top-p of 1 asks for no more than there is, beside one that is less,
    and the last token is the last that can be drawn."""
    torch.manual_seed(4)
    rows = 0.01 * torch.randn(2, 2000)
    rows[:, 1900:] -= 25  # their weights are not multiples of what a double has for the whole
    check(rows, [Draw(1.0, u=NEARLY_1), Draw(1.0, 0, 0.5, u=0.5)], block=2048)


class Recorder:
    """Stands for a kernel: counts its launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: Any) -> Recorder:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        self.launches += 1


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that have no values cannot be read: what is launched does not depend on them, nor on the rows' number."""
    kernels = {name: Recorder() for name in vars(sampling) if name.endswith("_kernel")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(sampling, name, kernel)
    for rows in (1, 64):
        for kernel in kernels.values():
            kernel.launches = 0
        result = draw(torch.empty(rows, 128256, device="meta"), [Draw(1.0, 50, 0.9)] * rows)
        assert (result.shape, result.dtype, result.device.type) == ((rows,), torch.int32, "meta")
        assert {name: kernel.launches for name, kernel in kernels.items()} == {
            "largest_kernel": 1, "argmax_kernel": 1, "histogram_kernel": 6, "cut_kernel": 6, "sum_kernel": 2,
            "draw_kernel": 1,
        }  # fmt: skip


def test_rows_too_long_to_add_up() -> None:
    with pytest.raises(ValueError, match="rows of 524288 logits cannot be drawn from: 524287 are the most"):
        Drawing(torch.empty(1, 2**19, device="meta"), torch.empty(1, device="meta"), [Draw(1.0)], 4096)
