"""What attention costs on this machine: measured in a few milliseconds, kept on disk."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from foreword.ops.cpu.native.plan import Costs

logger = logging.getLogger("foreword")

_TILES = 64
"""Tiles of the measurement: more than the second-level cache holds."""
_ROWS = 8
_REPEATS = 5


def fit(seconds: Callable[[int, int], float]) -> Costs:
    """Fit the model ``tiles * (tile + rows * row)`` to ``seconds(rows, tiles)``, the time of one task."""
    one, many = (min(seconds(rows, _TILES) for _ in range(_REPEATS)) / _TILES for rows in (1, _ROWS))
    row = max((many - one) / (_ROWS - 1), 1e-3 * one)
    return Costs(tile=max(one - row, 1e-3 * one), row=row)


def timed(run: Callable[[], object]) -> float:
    """Seconds that ``run`` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def remembered(directory: Path, key: str, measure: Callable[[], Costs]) -> Costs:
    """The costs kept in ``directory`` for ``key`` on this processor, measured if there are none. Another's file or a
    damaged one is measured again; a directory that cannot be written is no error."""
    file = directory / f"attention-costs-{key}.json"
    processor = _processor()
    try:
        kept = json.loads(file.read_text())
        if kept.pop("processor") == processor and all(isinstance(v, float) and v > 0 for v in kept.values()):
            return Costs(**kept)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        pass
    costs = measure()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(costs) | {"processor": processor}))
        partial.replace(file)
    except OSError as error:
        logger.debug("attention costs could not be kept in %s: %s", directory, error)
    return costs


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "model\t"))]
    except OSError:
        names = []
    return " ".join(sorted(set(names))) or platform.processor() or platform.machine()
