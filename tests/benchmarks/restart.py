"""What a restart costs with ``cache_dir``: ``python -m tests.benchmarks.restart``.

In turns, an engine with nothing cached computes a prompt, and a new engine on the directory that the first one left
brings the same prompt back. Shown is the time to the first token of both, and their ratio; each engine answers another
prompt first, so that neither pays for what happens once in a process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    print(", ".join(f"{name}: {value}" for name, value in describe().items() if not isinstance(value, (list, dict))))
    print("\n| tokens | computed, s | from disk, s | ratio | cached |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    for length in LENGTHS:
        computed, restored, cached = [], [], 0
        for number in range(options.rounds):
            prompt = random.Random(f"{length}/{number}").choices(range(1_000, 20_000), k=length)
            with tempfile.TemporaryDirectory() as folder:
                computed.append(first_token_s(Path(folder), prompt, options.model)[0])
                seconds, cached = first_token_s(Path(folder), prompt, options.model)
                restored.append(seconds)
        cold, warm = statistics.median(computed), statistics.median(restored)
        print(f"| {length:,} | {cold:.3f} | {warm:.3f} | {warm / cold:.3f} | {cached:,} |", flush=True)


if __name__ == "__main__":
    main()
