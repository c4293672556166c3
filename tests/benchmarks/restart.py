"""What a restart costs with ``cache_dir``: ``python -m tests.benchmarks.restart``.

In turns, an engine with nothing cached computes a prompt, and a new engine on the directory that the first one left
brings the same prompt back. Shown is the time to the first token of both, and their ratio; each engine answers another
prompt first, so that neither pays for what happens once in a process. The last column is what others notice: the
longest pause between two tokens of a stream that runs while the prompt is brought back, beside its usual pause.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from tests.benchmarks.machine import describe

from foreword import Engine

LENGTHS = (1_024, 8_190)
"""Tokens; the default model reads 8,192, one of them is generated."""


def first_token_s(directory: Path | None, prompt: list[int], model: str) -> tuple[float, int]:
    """Seconds to the first token of ``prompt`` in an engine of its own, and how many tokens were cached."""
    with Engine(model, kv_cache_memory="400MiB", cache_dir=directory) as engine:
        engine.generate(random.Random(1).choices(range(1_000, 20_000), k=64), max_tokens=2)
        usage = engine.generate(prompt, max_tokens=1).usage
    assert usage.time_to_first_token_s is not None
    return usage.time_to_first_token_s, usage.cached_tokens


def pauses_s(directory: Path, prompt: list[int], model: str) -> tuple[float, float]:
    """The usual and the longest pause between tokens of a stream while ``directory`` gives ``prompt`` back."""
    with Engine(model, kv_cache_memory="400MiB", cache_dir=directory) as engine:
        other = random.Random(2).choices(range(1_000, 20_000), k=64)
        engine.generate(other, max_tokens=2)
        restoring = threading.Thread(target=lambda: engine.generate(prompt, max_tokens=1))
        times: list[float] = []
        for _ in engine.stream(other, max_tokens=200, ignore_eos=True):
            times.append(time.perf_counter())
            if len(times) == 20:
                restoring.start()
        restoring.join()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps), max(gaps[20:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    print(", ".join(f"{name}: {value}" for name, value in describe().items() if not isinstance(value, (list, dict))))
    print("\n| tokens | computed, s | from disk, s | ratio | cached | others' pause, usual and longest, ms |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for length in LENGTHS:
        computed, restored, cached, pauses = list[float](), list[float](), 0, list[tuple[float, float]]()
        for number in range(options.rounds):
            prompt = random.Random(f"{length}/{number}").choices(range(1_000, 20_000), k=length)
            with tempfile.TemporaryDirectory() as folder:
                computed.append(first_token_s(Path(folder), prompt, options.model)[0])
                seconds, cached = first_token_s(Path(folder), prompt, options.model)
                restored.append(seconds)
                pauses.append(pauses_s(Path(folder), prompt, options.model))
        cold, warm = statistics.median(computed), statistics.median(restored)
        usual, longest = (1e3 * statistics.median(column) for column in zip(*pauses, strict=True))
        print(
            f"| {length:,} | {cold:.3f} | {warm:.3f} | {warm / cold:.3f} | {cached:,} | {usual:.1f}, {longest:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
