"""Decoding steps as graphs: padded, kept at their addresses, and right whatever the step before left there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from foreword.ops.triton.streams import WHOLE_DEVICE

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


def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Is said, and the step is right all the same; it is tried again, and given up at last."""
    tried = []

    def capture(step: Any, *_: Any) -> None:
        tried.append(step)
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(graphs._PaddedStep, "capture", capture)
    layers = Layers(Pages([50, 40]))
    parts = [(0, 49, 50), (1, 39, 40)]
    for _ in range(6):
        assert (layers.step(parts).double() - layers.expected(parts)).abs().max() < 3e-6
    assert len(tried) == 3
    assert [record.getMessage().count("no other will be tried") for record in caplog.records] == [0, 0, 1]
    assert all("planted" in record.getMessage() for record in caplog.records)


class Device(list[str]):
    """Doubles of torch's graphs and streams; ``fails``: what ends a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.fails = False
        self.entered: list[str] = []

        class Graph:
            def replay(_) -> None:
                self.append("replay")

        @contextmanager
        def entered(name: str) -> Iterator[None]:
            self.entered.append(name)
            yield
            self.entered.remove(name)

        @contextmanager
        def graph(_: Any, **options: Any) -> Iterator[None]:
            assert options == {"pool": "pool", "stream": "stream", "capture_error_mode": "thread_local"}
            assert self.entered == ["stream"]
            assert WHOLE_DEVICE.locked()
            assert not torch.is_inference_mode_enabled()
            self.append("capture")
            yield
            assert not torch.is_inference_mode_enabled()
            if self.fails:
                raise RuntimeError("planted")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "graph", graph)


@pytest.mark.parametrize("fails", [False, True])
def test_the_order_of_calls(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is captured on its own stream, by one thread at a time, and is what runs from then on; whatever fails,
    the stream and the lock are left."""
    device = Device(monkeypatch)
    device.fails = fails
    modes = []

    def run(hidden: Tensor, *_: Any) -> Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return hidden

    with torch.inference_mode():
        step = graphs._PaddedStep(run, 2, torch.ones(2, 4), {})
        with pytest.raises(RuntimeError, match="planted") if fails else nullcontext():
            step.capture("pool", "stream")
        step(torch.ones(2, 4), torch.ones(2), torch.ones(2), {})
    assert step.captured is not fails
    assert device == ["capture"] + ["replay"] * (not fails)
    assert modes == [True] * (1 + fails)
    assert not WHOLE_DEVICE.locked()
