"""``python -m tests.fuzz``: the fuzzer as a command."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `from support import ...`
os.environ.setdefault("FOREWORD_HOME", str(Path(__file__).parents[2] / ".cache" / "foreword"))

from support import DEVICES, save_tiny_llama, use_device

from .driver import Failure, Plan, Summary, World, fuzz, make_plan, resident_bytes, shrink


def main() -> int:
    """0 if everything held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, help="run this epoch only, and print its operations")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what engines compute on")
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS", help="for leaving out operations")
    parser.add_argument("--keep-going", action="store_true", help="do not end with the first failure")
    arguments = parser.parse_args()
    use_device(arguments.device)
    with tempfile.TemporaryDirectory() as directory:
        world = World(save_tiny_llama(Path(directory)))
        try:
            if arguments.epoch is not None:
                return _again(world, make_plan(arguments.seed, arguments.epoch), arguments.shrink)
            return _long(world, arguments)
        finally:
            world.close()


def _again(world: World, plan: Plan, seconds: float) -> int:
    try:
        world.run_again(plan)
    except Failure as failure:
        _show(world, failure, seconds)
        return 1
    print(
        f"epoch {plan.epoch} of seed {plan.seed} holds: {plan.mode}, {plan.path}, {plan.directory} directory, "
        f"{plan.chosen}"
    )
    return 0


def _show(world: World, failure: Failure, seconds: float) -> None:
    print(failure)
    if seconds > 0:
        print(f"\nthe smallest found:\n{shrink(world, failure, seconds)}\n")


def _long(world: World, arguments: argparse.Namespace) -> int:
    first = resident_bytes()

    told = 0

    def tell(summary: Summary, _: Plan) -> None:
        nonlocal told
        for failure in summary.failures[told:]:
            print(failure, flush=True)
        told = len(summary.failures)
        if summary.epochs % 25 == 0:
            print(
                f"{summary.operations} operations, {summary.epochs} epochs, {summary.seconds:.0f} s, "
                f"{summary.operations / summary.seconds:.0f} operations/s, {len(world.reference)} references, "
                f"{resident_bytes() / 2**20:.0f} MiB, {len(summary.failures)} failed epochs",
                flush=True,
            )

    summary = fuzz(
        world, arguments.seed, arguments.operations, on_epoch=tell,
        most_failures=10**9 if arguments.keep_going else 1,
    )  # fmt: skip
    for failure in summary.failures if arguments.shrink > 0 else ():
        print(f"\nthe smallest found:\n{shrink(world, failure, arguments.shrink)}\n")
    print(report(world, summary, first))
    return 1 if summary.failures else 0


def report(world: World, summary: Summary, first_bytes: int) -> str:
    """The summary of a run, for people."""
    rate = summary.operations / max(summary.seconds, 1e-9)
    lines = [
        f"{summary.operations} operations in {summary.epochs} epochs and {world.lives} engines, "
        f"{summary.seconds:.0f} s, {rate:.0f} operations/s, {summary.cpu_seconds:.0f} s of processors",
        "modes: " + ", ".join(f"{count} {name}" for name, count in summary.modes.most_common()),
        "operations: " + ", ".join(f"{count} {name}" for name, count in summary.names.most_common()),
        "totals: " + ", ".join(f"{count} {name}" for name, count in world.totals.items()),
        f"references: {len(world.reference)}",
        f"memory: {first_bytes / 2**20:.0f} MiB at the start, {resident_bytes() / 2**20:.0f} MiB at the end",
        f"failed epochs: {len(summary.failures)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
