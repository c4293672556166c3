"""A forked child: the parent's engine says what to do, and what it says works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_child_can_make_its_own_engine(tiny_dir: Path) -> None:
    """Neither OpenMP's workers nor the registry's engines of the parent are in the child's way."""
    calls = [
        f"{make}({str(tiny_dir)!r}, **options).generate([1, 2, 3], max_tokens=4, temperature=0).token_ids"
        for make in ("Engine", "Engine.shared")
    ]
    parent, *children = run(tiny_dir, "\n".join(f"child(lambda: {call})" for call in calls))
    assert children == [parent] * 2


def test_a_stream_of_the_parent_ends_with_a_clear_error(tiny_dir: Path) -> None:
    """A stream carried into a child, begun or not, does not wait for a thread that is not there."""
    begin = "stream = engine.stream([5], max_tokens=2000, ignore_eos=True)"
    use = "child(lambda: next(stream))"
    _, *children = run(tiny_dir, "\n".join([begin, use, "stream.close()", begin, "next(stream)", use]))
    assert len(children) == 2
    for child in children:
        assert child.startswith("EngineClosedError")
        assert "forked child" in child
