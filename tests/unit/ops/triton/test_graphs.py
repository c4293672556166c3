"""Decoding steps as graphs: padded, kept at their addresses, and right whatever the step before left there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.ops.protocol import AttentionSpec
from foreword.ops.triton import graphs
from foreword.ops.triton.attention import attend, tile_heights
from foreword.ops.triton.graphs import DecodeGraphs, padded_rows
from foreword.ops.triton.plan import PlanDraft, PlanSettings
from foreword.ops.triton.step import StepPlans

from .pages import BLOCK, DEVICE, Pages

SPEC = AttentionSpec(0.125)
NEAR = AttentionSpec(0.125, window=40)
Part = tuple[int, int, int]


class Layers:
    """Two layers of attention, one with a window; remembers what each launch was given."""

    def __init__(self, pages: Pages, *, deterministic: bool = False, programs: int = 1) -> None:
        self.pages = pages
        self.given: list[dict[str, Any]] = []
        self.plans: list[PlanDraft] = []
        heights = tile_heights(pages.dtype, pages.dim, deterministic=deterministic)
        settings = PlanSettings(pages.kv_heads, pages.group, BLOCK, programs, heights, deterministic)
        self.graphs = DecodeGraphs(self.run, settings, [None, NEAR.window, None], self.plans.append)

    def run(self, hidden: Tensor, plans: StepPlans, slots: Tensor, outputs: Tensor) -> Tensor:
        tensors = [hidden, slots, outputs, plans.positions, *(plan.buffer for plan in plans.by_window.values())]
        self.given.append({
            "rows": len(hidden), "addresses": [tensor.data_ptr() for tensor in tensors], "slots": slots.tolist(),
            "positions": plans.positions.tolist(),
        })  # fmt: skip
        query = hidden.view(len(hidden), -1, self.pages.dim)
        results = [attend(query, self.pages.layer, plans.by_window[spec.window], spec) for spec in (SPEC, NEAR)]
        return torch.cat(results, dim=1).flatten(1)

    def step(self, parts: list[Part], outputs: list[int] | None = None) -> Tensor:
        """``[R, 2 * heads, D]``"""
        sequences = self.pages.sequences(parts)
        hidden = torch.cat([self.pages.queries[number][begin:end].flatten(1) for number, begin, end in parts])
        chosen = list(range(len(parts))) if outputs is None else outputs
        result = self.graphs(
            hidden.to(DEVICE),
            StepPlans.create(sequences, torch.device(DEVICE)),
            torch.arange(100, 100 + len(parts), dtype=torch.int32, device=DEVICE),
            torch.tensor(chosen, dtype=torch.int32, device=DEVICE),
        )
        return result.view(len(chosen), -1, self.pages.dim).cpu().clone()

    def expected(self, parts: list[Part]) -> Tensor:
        return torch.cat([self.pages.expected(parts, spec) for spec in (SPEC, NEAR)], dim=1)


def test_numbers_of_rows() -> None:
    """Few, and never less than there are."""
    assert [padded_rows(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 64, 65, 256)] == [1, 2, 4, 4, 8, 8, 16, 64, 72, 256]


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps(deterministic: bool) -> None:
    """Steps of one shape read what each of them brought, from the same addresses."""
    pages = Pages([300, 290, 70, 40], shared=[0, 256, 0, 0])
    layers = Layers(pages, deterministic=deterministic, programs=4)
    steps: list[list[Part]] = [
        [(0, 298, 299), (1, 288, 289), (2, 68, 69)],
        [(0, 299, 300), (1, 289, 290), (2, 69, 70)],
        [(2, 69, 70), (1, 289, 290), (0, 299, 300), (3, 39, 40)],
        [(0, 298, 299), (1, 288, 289), (3, 38, 39)],
    ]
    for parts in steps:
        assert (layers.step(parts).double() - layers.expected(parts)).abs().max() < 3e-6
    assert [given["rows"] for given in layers.given] == [4] * 4
    assert len({tuple(given["addresses"]) for given in layers.given[:2]}) == 1
    assert layers.given[0]["slots"] == [100, 101, 102, -1]
    assert layers.given[1]["positions"][:3] == [299, 289, 69]
    assert len(layers.plans) == 2 * len(steps)


def test_bits_do_not_depend_on_padding() -> None:
    """Of deterministic plans: alone and among five, whose batch is padded to eight."""
    pages = Pages([300, 290, 70, 40, 20])
    layers = Layers(pages, deterministic=True, programs=4)
    parts = [(number, len(pages.queries[number]) - 1, len(pages.queries[number])) for number in range(5)]
    together = layers.step(parts)
    for number, part in enumerate(parts):
        assert torch.equal(layers.step([part])[0], together[number])


def test_some_outputs() -> None:
    """A token of a prompt's chunk may have no use for its hidden state."""
    layers = Layers(Pages([50, 40, 30]))
    parts = [(0, 49, 50), (1, 39, 40), (2, 29, 30)]
    assert torch.equal(layers.step(parts, outputs=[0, 2]), layers.step(parts)[[0, 2]])


def test_graphs_that_were_not_used_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used first; a shape is captured when it comes back."""
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    layers = Layers(Pages([50, 40, 30, 20, 10]))
    parts = [(0, 49, 50), (1, 39, 40), (2, 29, 30), (3, 19, 20), (4, 9, 10)]
    for count in (1, 2, 1, 3):
        layers.step(parts[:count])
    held = layers.graphs._steps
    assert [(key[0], step.captured) for key, step in held.items()] == [(1, True), (4, False)]
