"""``python -m tests.benchmarks.gpu kernels`` and ``engine``: what must be measured on a GPU, next to its targets.

Each group of measurements is by itself: one that fails is reported and the others go on, and with ``--write`` its
section of RESULTS-GPU.md is there as soon as it is done, so nothing is lost if the time runs out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shapes import SHAPES, support

if TYPE_CHECKING:
    from .results import Report

RESULTS = Path(__file__).parent.parent / "RESULTS-GPU.md"
KERNELS = ("decode", "shared", "prefill", "products", "small", "host", "copies")
ENGINE = ("start", "decode", "int4", "exact", "shared", "profile")
Group = Callable[["Report"], None]


def main() -> int:
    options = _parser().parse_args()
    if missing := _missing(options.rehearse):
        print(f"benchmarks.gpu: {missing}", file=sys.stderr)
        return 2
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when it is imported
        support("interpreter").prepare()
        print("REHEARSAL on the CPU under Triton's interpreter: no time and no ratio below means anything\n")
    from .device import Device

    device = Device(options.rehearse)
    groups = _kernels(options, device) if options.command == "kernels" else _engine(options, device)
    return run(options, groups)


def run(options: argparse.Namespace, groups: Mapping[str, Group]) -> int:
    """Carry out the groups; 1 if one of them failed."""
    from .results import Report, write_section

    failed = 0
    print(_heading(), flush=True)
    for name, group in groups.items():
        print(f"\n{name}\n", flush=True)
        report = Report(options.rehearse)
        try:
            group(report)
        except Exception as error:
            failed = 1
            traceback.print_exc()
            report.note(f"FAILED after this: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        model = f", {options.model}" if options.command == "engine" else ""
        if options.write and not options.rehearse:
            write_section(options.write, f"{options.command}{model}: {name}", report.render(_heading()))
    return failed


def _kernels(options: argparse.Namespace, device: Any) -> dict[str, Group]:
    from . import attention, host, products, tune
    from .sizes import FULL, SMALL

    sizes = SMALL if options.rehearse else FULL
    if options.tune:
        return {"tuning": lambda report: tune.measure(device, sizes, report, options.seconds)}
    groups: dict[str, Group] = {
        "decode": lambda report: attention.measure_decode(device, sizes, report),
        "shared": lambda report: attention.measure_shared(device, sizes, report),
        "prefill": lambda report: attention.measure_prefill(device, sizes, report),
        "products": lambda report: products.measure(device, sizes, report),
        "small": lambda report: products.measure_small(device, sizes, report),
        "host": lambda report: host.measure(device, sizes, report),
        "copies": lambda report: host.measure_copies(device, sizes, report),
    }
    return {name: groups[name] for name in options.only or KERNELS}


def _engine(options: argparse.Namespace, device: Any) -> dict[str, Group]:
    from . import engine

    os.environ.setdefault("FOREWORD_HOME", str(RESULTS.parents[2] / ".cache" / "foreword"))
    if options.rehearse:
        options.model = "tiny"
    dtype = "float32" if options.rehearse else "bfloat16"
    directory = Path(tempfile.gettempdir()) / "foreword-benchmarks" / options.model
    shape = SHAPES[options.model]
    bench = engine.Bench(
        device, shape, shape.save(directory, dtype, device.name), engine.SMALL if options.rehearse else engine.FULL
    )
    return {
        name: lambda report, name=name: getattr(engine, f"measure_{name}")(bench, report)  # type: ignore[misc]
        for name in options.only or ENGINE
    }


def _missing(rehearsal: bool) -> str | None:
    """What this machine lacks."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    import torch

    if rehearsal:
        return None
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return "TRITON_INTERPRET is set; kernels would not run on the GPU"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no NVIDIA GPU here; --rehearse runs everything on the CPU, tiny"
    return None


def _heading() -> str:
    from .. import machine

    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found, gpu = machine.describe(), machine.describe_gpu()
    command = shlex.join(["python", "-m", "tests.benchmarks.gpu", *sys.argv[1:]])
    return (
        f"{date}, commit {found['commit'] or 'unknown'}: `{command}`\n\n"
        f"{gpu}. {found['cpu']}, {found['cpus']} CPUs, load average {os.getloadavg()[0]:.2f}; {found['system']}."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, groups, about in (
        ("kernels", KERNELS, "each kernel by itself: G1 to G3"),
        ("engine", ENGINE, "the whole engine, random weights: G4 to G8"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument(
            "--only",
            type=partial(_chosen, known=groups),
            metavar="A,B",
            help=f"of {', '.join(groups)}",
        )
        command.add_argument("--write", nargs="?", type=Path, const=RESULTS, metavar="FILE",
                             help="put the tables into this file (default: RESULTS-GPU.md)")  # fmt: skip
        command.add_argument("--rehearse", action="store_true", help="tiny, on the CPU, under Triton's interpreter")
    kernels, engine = commands.choices["kernels"], commands.choices["engine"]
    kernels.add_argument("--tune", action="store_true", help="instead, which constants are fastest")
    kernels.add_argument("--seconds", type=float, default=500, help="for all of --tune (default: %(default)s)")
    engine.add_argument("--model", choices=("8b", "1.5b", "135m"), default="8b", help="(default: %(default)s)")
    return parser


def _chosen(text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; known are {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
