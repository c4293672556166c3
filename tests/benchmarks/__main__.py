"""``python -m tests.benchmarks``: Foreword and every installed peer in turn, on the same work."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path

from foreword.cli import workloads
from foreword.cli.workloads import WORKLOADS, Workload
from foreword.model import embedded
from foreword.model.source import resolve
from foreword.text.conversation import encode_chat
from foreword.text.tokenizer import Tokenizer

from . import catalogue, machine, models, report
from .machine import HERE
from .processes import Workers
from .turns import FRESH, Bench, Record

ROOT = HERE.parent.parent
QUESTION = "Which city is the capital of Japan? Answer briefly."


def main() -> int:
    options = _parser().parse_args()
    if options.report:
        print(report.render(json.loads(options.report.read_text())))
        return 0
    try:
        chosen, fresh = split(options.workloads, options.growth)
        entries = catalogue.choose(options.engines, options.variants)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    entries, skipped = catalogue.installed(entries, options.peers)
    print("\n".join([*skipped, f"measuring {', '.join(entry.name for entry in entries) or 'nothing'}"]), flush=True)
    result = measure(options, entries, chosen, fresh) | {"skipped": skipped}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{report.render(result)}")
    return 1 if result["failures"] else 0


def split(names: str | None, growth: bool) -> tuple[list[Workload], list[str]]:
    """Workloads that run in a living process, and those of :data:`FRESH`; None takes all but the growth."""
    asked = [*FRESH, *WORKLOADS] if names is None else [name.strip() for name in names.split(",")]
    living = ",".join(name for name in asked if name not in FRESH)
    chosen = workloads.choose(living, growth) if living or growth else []
    return chosen, [name for name in FRESH if name in asked]


def measure(
    options: argparse.Namespace, entries: list[catalogue.Entry], chosen: list[Workload], fresh: list[str]
) -> Record:
    """Run everything; the result is what the JSON file holds."""
    tokenizer = Tokenizer.from_directory(resolve(embedded.NAME).directory)
    word_ids = workloads.words_of(tokenizer.encode, lambda token: tokenizer.decode([token]), tokenizer.vocab_size)
    question = encode_chat(tokenizer, [{"role": "user", "content": QUESTION}])
    logs = options.data / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with Workers(options.peers, options.threads, logs) as workers:
        bench = Bench(
            workers,
            lambda entry: models.path(entry.model_kind, options.data, entry.engine.interpreter(options.peers)),
            word_ids,
            question,
            options.max_seconds,
            lambda line: print(line, flush=True),
        )
        try:
            bench.run(entries, chosen, fresh, options.runs)
        except KeyboardInterrupt:
            print("\ninterrupted: what follows is what was measured until then", flush=True)
    for about in bench.about.values():
        about["text"] = tokenizer.decode(about["answer"])
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "tests.benchmarks", *sys.argv[1:]]),
        "machine": machine.describe(),
        "threads": options.threads,
        "question": QUESTION,
        "about": bench.about,
        "records": bench.records,
        "failures": bench.failures,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--engines", metavar="A,B", help=f"of {', '.join(catalogue.ENGINES)} (default: all)")
    parser.add_argument("--workloads", metavar="W1,W4", help="of W1 to W7, start, memory (default: all)")
    parser.add_argument("--growth", action="store_true", help="also W4 with more requests and longer beginnings")
    parser.add_argument("--runs", type=int, default=3, help="how often to run each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (default: %(default)s)")
    parser.add_argument("--variants", metavar="int8,vllm:bf16", help="instead of each engine's own")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", metavar="DIR", help="their environments")
    parser.add_argument("--data", type=Path, default=ROOT / ".cache" / "benchmarks", metavar="DIR", help="models, logs")
    parser.add_argument(
        "--max-seconds", type=float, default=180, help="no further runs of what took longer (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to this file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the tables of such a file, measure nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
