"""Decoding steps as CUDA graphs: some hundred launches become one, so that the host does not hold up the device.

A graph repeats launches with the addresses and shapes that it was captured with. So the rows of a batch are padded to
one of a few numbers, the arrays of its plan to powers of two, and what a step brings is copied to where the graph reads
it. Padding rows belong to no item and to no slot: what is computed for them is thrown away.

A graph is captured when a shape occurs for the second time; the first time runs launch by launch, which also compiles
what has to be. All graphs share one pool of memory, as they never run at the same time. Where capturing fails, because
memory has run out or another thread of the process has the whole device waited for, the step is launched as before.

No GPU has captured a graph yet. Where there is none, launches are repeated instead, from the same addresses and with
the same shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foreword.ops.triton.planner import draft_plan
from foreword.ops.triton.step import StepPlans
from foreword.ops.triton.streams import WHOLE_DEVICE

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.triton.plan import PlanDraft, PlanSettings

logger = logging.getLogger("foreword")

MOST_ROWS = 256
"""Of a batch; with more, a step takes the device longer than the host takes for its launches."""
_MOST_GRAPHS = 128
"""Each takes some megabytes; the one that was not used for the longest time goes first."""
_MOST_FAILURES = 3
"""To capture; after these, no more is captured."""

Run = Callable[["Tensor", StepPlans, "Tensor", "Tensor"], "Tensor"]
"""``hidden [N, hidden]``, plans, ``slots [T]`` and ``outputs [R]`` to ``[R, hidden]``, all layers."""


def padded_rows(num_rows: int) -> int:
    """1, 2, 4, 8 and the multiples of 8."""
    return -(-num_rows // 8) * 8 if num_rows > 4 else 1 << (num_rows - 1).bit_length()


class DecodeGraphs:
    """Runs decoding steps.

    Args:
        run: launches all layers.
        settings: of their attention; ``windows``: which of them have.
        count: is told every plan that is made.
    """

    def __init__(
        self,
        run: Run,
        settings: PlanSettings,
        windows: Sequence[int | None],
        count: Callable[[PlanDraft], None],
    ) -> None:
        self._run = run
        self._settings = settings
        self._windows = list(dict.fromkeys(windows))
        self._count = count
        self._steps: dict[Any, _PaddedStep] = {}  # the least recently used first
        self._memory: Any = None  # of all graphs; made with the first, like the stream that they are captured on
        self._stream: torch.cuda.Stream | None = None
        self._failures = 0

    def __call__(self, hidden: Tensor, plans: StepPlans, slots: Tensor, outputs: Tensor) -> Tensor:
        """The result of ``run`` for a batch of at most :data:`MOST_ROWS` rows, each of a sequence of its own. It is
        overwritten by the next call."""
        drafts = {window: draft_plan(plans.sequences, self._settings, window) for window in self._windows}
        for draft in drafts.values():
            self._count(draft)
        rows = padded_rows(len(hidden))
        key = rows, *((draft.tile_rows, draft.size.rounded(rows)) for draft in drafts.values())
        step = self._steps.pop(key, None)
        if step is None:
            step = _PaddedStep(self._run, rows, hidden, drafts)
            if len(self._steps) == _MOST_GRAPHS:
                del self._steps[next(iter(self._steps))]
        elif not step.captured and self._failures < _MOST_FAILURES:
            self._capture(step, hidden.device)
        self._steps[key] = step
        result = step(hidden, plans.positions, slots, drafts)
        return result if len(outputs) == len(result) else result.index_select(0, outputs)

    def _capture(self, step: _PaddedStep, device: torch.device) -> None:
        if self._stream is None and device.type == "cuda":  # torch's own would be on the device that was first
            self._stream, self._memory = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        try:
            step.capture(self._memory, self._stream)
        except RuntimeError as error:
            self._failures += 1
            given_up = self._failures == _MOST_FAILURES
            logger.warning(
                "a decoding step was not captured as a CUDA graph, so it costs the host a launch for each kernel%s: %s",
                "; no other will be tried" if given_up else "", error,
            )  # fmt: skip


class _PaddedStep:
    """One shape of a step, and what it reads, at addresses that stay."""

    def __init__(self, run: Run, rows: int, hidden: Tensor, drafts: dict[int | None, PlanDraft]) -> None:
        device = hidden.device
        self._run = run
        self._hidden = torch.zeros((rows, hidden.shape[1]), dtype=hidden.dtype, device=device)
        self._slots = torch.zeros(rows, dtype=torch.int32, device=device)
        self._outputs = torch.arange(rows, dtype=torch.int32, device=device)
        self._plans = StepPlans(torch.zeros(rows, dtype=torch.int32, device=device))
        for window, draft in drafts.items():
            self._plans.by_window[window] = draft.place(device, draft.size.rounded(rows), num_tokens=rows)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None
        self.captured = False

    def __call__(self, hidden: Tensor, positions: Tensor, slots: Tensor, drafts: dict[int | None, PlanDraft]) -> Tensor:
        """``[T, hidden]`` for the T rows of ``hidden``."""
        count = len(hidden)
        self._hidden[:count].copy_(hidden)
        self._plans.positions[:count].copy_(positions)
        self._slots.fill_(-1)
        self._slots[:count].copy_(slots)
        for window, draft in drafts.items():
            draft.replace(self._plans.by_window[window])
        if self._graph is None:
            self._result = self._launch()
        else:
            self._graph.replay()
        assert self._result is not None
        return self._result[:count]

    def capture(self, memory: Any, stream: torch.cuda.Stream | None) -> None:
        """Capture the launches on ``stream``, with ``memory`` for what they compute; without one, there are no graphs.

        Raises:
            RuntimeError: the device, a library or torch refuses; the step can be run as before.
        """
        if stream is not None:
            graph = torch.cuda.CUDAGraph()
            with (
                WHOLE_DEVICE,
                torch.cuda.stream(stream),  # is left for certain: the graph's context does not leave it if it fails
                torch.inference_mode(False),  # torch makes tensors then that graphs of the whole process share
                torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"),
                torch.inference_mode(),
            ):
                self._result = self._launch()
            self._graph = graph
        self.captured = True

    def _launch(self) -> Tensor:
        return self._run(self._hidden, self._plans, self._slots, self._outputs)
