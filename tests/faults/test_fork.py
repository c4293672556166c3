"""A forked child: the parent's engine says what to do, and what it says works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PREPARE = """
import os, sys
from foreword import Engine, EngineClosedError
options = dict(kv_cache_memory="1MB", dtype="float32")
def child(action):
    if os.fork() == 0:
        try:
            print(action(), flush=True)
        except EngineClosedError as error:
            print("EngineClosedError", error, flush=True)
        finally:
            os._exit(0)
    os.wait()
engine = Engine.shared({model!r}, **options)
expected = engine.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids
print(expected, flush=True)
"""


def run(model: Path, program: str) -> list[str]:
    """Lines that parent and child print. A hang is a failure."""
    code = PREPARE.format(model=str(model)) + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("make", ["Engine", "Engine.shared"])
def test_a_child_can_make_its_own_engine(tiny_dir: Path, make: str) -> None:
    """Neither OpenMP's workers nor the registry's engines of the parent are in the child's way."""
    call = f"{make}({str(tiny_dir)!r}, **options).generate([1, 2, 3], max_tokens=4, temperature=0).token_ids"
    parent, child = run(tiny_dir, f"child(lambda: {call})")
    assert parent == child


@pytest.mark.parametrize("started", [False, True])
def test_a_stream_of_the_parent_ends_with_a_clear_error(tiny_dir: Path, started: bool) -> None:
    """A stream carried into a child does not wait for a thread that is not there."""
    begin = "next(stream)" if started else ""
    program = f"stream = engine.stream([5], max_tokens=2000, ignore_eos=True)\n{begin}\nchild(lambda: next(stream))"
    _, child = run(tiny_dir, program)
    assert child.startswith("EngineClosedError")
    assert "forked child" in child
