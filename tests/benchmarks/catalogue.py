"""Which engines there are: their variants, where they are installed, what they need to run at their best."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .machine import multiplies_bf16

BATCHED = ("W4", "W4w", "W6", "W7", "memory")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and how to run it.

    Attributes:
        adapter: its file in ``adapters/``, without the ending.
        peer: the folder of its virtual environment; None is the interpreter that runs the benchmark.
        variants: by name the kind of model file it reads (see :mod:`models`).
        default: the variants that run unless others are asked for.
        only: the workloads it is for; empty means all. Growth is measured for all.
        preload: libraries to load before everything else, by name; from its own packages or from the system.
    """

    name: str
    adapter: str
    peer: str | None
    variants: dict[str, str]
    default: tuple[str, ...]
    only: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()

    def interpreter(self, peers: Path) -> Path:
        """Its Python; it need not exist."""
        # Not resolved: through the link, not its target, Python finds the environment.
        return Path(sys.executable) if self.peer is None else peers.absolute() / self.peer / "bin" / "python"

    def environment(self, peers: Path, threads: int) -> dict[str, str]:
        """Environment variables of its process."""
        # Set on some machines for old BLAS builds; they slow a current one.
        kept = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        env = kept | counts | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.peer is not None and (
            found := [p for name in self.preload if (p := _library(peers / self.peer, name))]
        ):
            env["LD_PRELOAD"] = ":".join(found)
        return env


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine in one of its variants: a line of the table."""

    engine: Engine
    variant: str

    @property
    def name(self) -> str:
        return f"{self.engine.name}:{self.variant}"

    @property
    def model_kind(self) -> str:
        return self.engine.variants[self.variant]

    def runs(self, workload: str) -> bool:
        """Whether ``workload`` is for it."""
        return not self.engine.only or workload in self.engine.only or workload[:3] in ("W4r", "W4p")


_GGUF = {kind: kind for kind in ("q4_0", "q4_1", "q8_0")}
_CHECKPOINT = {"bf16": "checkpoint", "fp32": "checkpoint"}
_ALL = (
    Engine(
        "foreword",
        "foreword",
        None,
        dict.fromkeys(("bf16", "int8", "int4", "fp32", "auto"), "name"),
        ("bf16", "int8", "int4"),
    ),
    Engine(
        "vllm",
        "vllm",
        "vllm",
        _CHECKPOINT | {"int8": "w8a8", "int8-fp32": "w8a8"},
        ("bf16", "int8") if multiplies_bf16() else ("fp32", "int8-fp32"),
        preload=("tcmalloc_minimal", "iomp5"),
    ),
    Engine("openvino", "openvino", "openvino", _GGUF | {"int8": "openvino"}, ("q4_1", "int8")),
    Engine("llamacpp", "llamacpp", "llamacpp", _GGUF, ("q4_0", "q8_0")),
    Engine("llamacpp-batch", "llamacpp_batch", "llamacpp", _GGUF, ("q4_0", "q8_0"), only=BATCHED),
    Engine("transformers", "transformers", "transformers", _CHECKPOINT, ("bf16",) if multiplies_bf16() else ("fp32",)),
)
ENGINES = {engine.name: engine for engine in _ALL}


def choose(engines: str | None, variants: str | None) -> list[Entry]:
    """The lines of the table, in order.

    Args:
        engines: names separated by commas; None takes all.
        variants: ``variant`` or ``engine:variant``, separated by commas. An engine with none of them keeps its own.

    Raises:
        ValueError: an unknown engine or variant.
    """
    names = list(ENGINES) if engines is None else [name.strip() for name in engines.split(",")]
    if unknown := [name for name in names if name not in ENGINES]:
        raise ValueError(f"there is no engine {unknown[0]!r}; known are {', '.join(ENGINES)}")
    asked = [] if variants is None else [name.strip() for name in variants.split(",")]
    known = {form for engine in ENGINES.values() for v in engine.variants for form in (v, f"{engine.name}:{v}")}
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"there is no variant {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return [Entry(ENGINES[name], variant) for name in names for variant in _variants(ENGINES[name], asked)]


def installed(entries: Iterable[Entry], peers: Path) -> tuple[list[Entry], list[str]]:
    """Those whose interpreter is there, and for each engine that is not a line that says so."""
    there, missing = [], {}
    for entry in entries:
        if entry.engine.interpreter(peers).exists():
            there.append(entry)
        else:
            missing[entry.engine.name] = (
                f"{entry.engine.name}: skipped, not installed in {peers / str(entry.engine.peer)}"
            )
    return there, list(missing.values())


def _variants(engine: Engine, asked: list[str]) -> list[str]:
    mine = [variant for variant in engine.variants if variant in asked or f"{engine.name}:{variant}" in asked]
    return mine or list(engine.default)


def _library(environment: Path, name: str) -> str | None:
    """A shared library of an environment, or else the system's."""
    own = sorted(environment.absolute().glob(f"lib/**/lib{name}.so*"))
    return str(own[0]) if own else ctypes.util.find_library(name)
