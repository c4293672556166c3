"""``foreword bench``: how fast a model runs on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.cli import workloads
from foreword.cli.options import add_engine_options, open_engine
from foreword.cli.workloads import Ids, Output, Reply, Result, Workload

if TYPE_CHECKING:
    from foreword import Engine


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a model on this machine",
        description="Measures a model on this machine: first tokens, decoding, batches over a shared beginning, "
        "an agent loop, a hundred requests at once. Prompts are random words; each run has new ones.",
        epilog="workloads:\n" + "\n".join(f"  {each.name:5} {each.title}" for each in workloads.WORKLOADS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", metavar="W1,W4", help="which to run, separated by commas (default: all)")
    parser.add_argument("--growth", action="store_true", help="also W4 with 1 to 64 requests and 512 to 7,936 shared")
    parser.add_argument("--runs", type=int, default=3, help="how often to run each (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to this file")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    chosen = workloads.choose(options.workloads, options.growth)
    if options.runs < 1:
        raise ValueError(f"--runs is {options.runs}: give at least 1")
    start_s = time.perf_counter()
    results: dict[str, list[Result]] = {}
    with open_engine(options) as engine:
        loaded_s = time.perf_counter() - start_s
        print(f"{engine.model}: {engine.backend}; loaded in {loaded_s:.1f} s{_load()}; medians of {options.runs}\n")
        driver, word_ids = EngineDriver(engine), word_ids_of(engine)
        workloads.warm_up(driver, word_ids)
        for workload in chosen:
            if workload.longest > engine.max_model_len:
                print(f"{workload.name:6}  skipped: it needs {workload.longest:,} tokens in one sequence")
                continue
            runs = results[workload.name] = []
            for attempt in range(options.runs):
                try:
                    runs.append(workloads.run(workload, driver, word_ids, str(attempt)))
                except workloads.Disturbed as disturbed:
                    print(f"{workload.name:6}  left out: {disturbed}")
            if runs:
                print(describe(workload, runs), flush=True)
        if memory := resident_bytes():
            print(f"{'memory':6}  {'resident, everything included':50}  {number(memory / 1e9):>7} GB")
    if options.json:
        content = {name: [dataclasses.asdict(result) for result in runs] for name, runs in results.items()}
        options.json.write_text(json.dumps({"model": options.model, "workloads": content}, indent=1) + "\n")


class EngineDriver:
    """An engine in this process as the workloads see it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(self, prompts: list[Ids], max_tokens: int) -> Reply:
        start_s = time.perf_counter()
        outputs = self._engine.generate(prompts, max_tokens=max_tokens, temperature=0, ignore_eos=True)
        seconds = time.perf_counter() - start_s
        return Reply(seconds, [Output(o.token_ids, o.usage.cached_tokens, _reason(o.error)) for o in outputs])

    def reset(self) -> None:
        self._engine.reset_prefix_cache()


def word_ids_of(engine: Engine) -> Ids:
    """Ids to make random prompts of."""
    return workloads.words_of(engine.encode, lambda token: engine.decode([token]), engine.vocab_size)


def describe(workload: Workload, runs: Iterable[Result]) -> str:
    """One line: the median, the range, and what was reused or went wrong."""
    runs = list(runs)
    values = [result.value for result in runs]
    middle, low, high = (number(value) for value in (statistics.median(values), min(values), max(values)))
    line = f"{workload.name:6}  {workload.title:50}  {middle:>7} {workload.unit:5}"
    if len(runs) > 1:
        line += f"  ({low} to {high})"
    prompt, cached = runs[-1].prompt_tokens, runs[-1].cached_tokens
    if cached:
        line += f", {cached / prompt:.0%} of the prompts reused"
    errors = sum(result.errors for result in runs)
    return line + (f", {errors} requests FAILED" if errors else "")


def resident_bytes() -> int | None:
    """Memory of this process that is in use now; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _load() -> str:
    """How busy the machine is, where the system says it: numbers of a busy one mean little."""
    return (
        f"; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors" if hasattr(os, "getloadavg") else ""
    )


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _reason(error: Exception | None) -> str | None:
    return None if error is None else str(error)
