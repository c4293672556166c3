"""Where kernels are timed: a GPU by its own events, or, for rehearsals, Triton's interpreter by the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .results import Spread

if TYPE_CHECKING:
    from foreword.ops.triton.backend import TritonOps

    from .results import Report

Run = Callable[[], object]
_FLUSHED = 256 * 2**20
"""Bytes that are written between repetitions: more than any second-level cache has."""
LEAST_COLD = 256 * 2**20
"""Bytes of which weights that are read in turn must be, so that none is still cached when its turn comes again."""


class Device:
    """Runs and times.

    Attributes:
        name: for torch; ``rehearsal``: times mean nothing.
    """

    def __init__(self, rehearsal: bool) -> None:
        self.rehearsal = rehearsal
        self.name = "cpu" if rehearsal else "cuda"
        self._cache = torch.empty(1 if rehearsal else _FLUSHED, dtype=torch.uint8, device=self.name)
        torch.manual_seed(0)

    @property
    def processors(self) -> int:
        return 2 if self.rehearsal else int(torch.cuda.get_device_properties(self.name).multi_processor_count)

    def ops(self, *, deterministic: bool = False) -> TritonOps:
        """The backend that is measured."""
        from foreword.ops.triton.backend import TritonOps

        return TritonOps(torch.bfloat16, self.name, deterministic=deterministic)

    def wait(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize()

    def seconds(self, *runs: Run, repeats: int = 20, before: Run | None = None) -> Spread:
        """Device time of one of ``runs``, which are carried out one after the other.

        They are captured in one graph, as decoding steps are, so that the host's launches do not count. Before each
        repetition the second-level cache is overwritten, while which the host gets ahead.

        Args:
            before: is called when all is compiled and captured; what it starts on another stream goes on meanwhile.
        """
        for run in runs:
            run()  # compiles
        if self.rehearsal:
            return self.wall(*runs, repeats=1)
        launch = self._captured(runs)
        if before is not None:
            before()
        pairs = []
        for _ in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._cache.zero_()
            begin.record()
            launch()
            end.record()
            pairs.append((begin, end))
        pairs[-1][1].synchronize()
        return _spread([begin.elapsed_time(end) / 1e3 / len(runs) for begin, end in pairs[3:]])

    def wall(self, *runs: Run, repeats: int = 5) -> Spread:
        """Time of one of ``runs`` by the clock, until the device is done with all of them."""
        times = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            for run in runs:
                run()
            self.wait()
            times.append((time.perf_counter() - begin) / len(runs))
        return _spread(times)

    def _captured(self, runs: tuple[Run, ...]) -> Run:
        """``runs`` as a graph; one by one where they cannot be captured, which is said."""

        def launch() -> None:
            for run in runs:
                run()

        self.wait()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                launch()
        except RuntimeError as error:
            print(f"  not captured, so the host's launches may count: {str(error).splitlines()[0]}", flush=True)
            self.wait()
            return launch
        return graph.replay


def copy_bandwidth(device: Device, size: int) -> Spread:
    """Bytes per second, read and written, of torch's copy of ``size`` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    return device.seconds(lambda: target.copy_(source)).under(2 * size)


def report_bandwidth(device: Device, size: int, report: Report) -> float:
    """The median of :func:`copy_bandwidth`."""
    bandwidth = copy_bandwidth(device, size)
    report.add("torch's copy, read and written", bandwidth.times(1e-12), "TB/s")
    return bandwidth.median


def matmul_flops(device: Device, size: int) -> Spread:
    """Operations per second of torch's bf16 product of two square matrices."""
    a, b = (torch.randn(size, size, device=device.name).bfloat16() for _ in range(2))
    return device.seconds(lambda: a @ b).under(2 * size**3)


def _spread(times: list[float]) -> Spread:
    return Spread(statistics.median(times), min(times), max(times))
