"""The kernels compiled ahead of time for devices that are not there: in processes without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.ops.triton.compiled import Usage, main
from foreword.ops.triton.numeric import INTERPRETED

COMMAND = [sys.executable, "-m", "foreword.ops.triton.compiled"]
DEVICES = pytest.mark.parametrize("arch", [80, 90, 100])


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(Path(os.environ["FOREWORD_HOME"]) / "triton")
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment)


@DEVICES
def test_some_can_be_launched(arch: int, record_property: Callable[[str, object], None]) -> None:
    """Of each kind a few: none runs out of registers or shared memory."""
    done = compiled(str(arch))
    record_property("table", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"sm_{arch} ") == 30


@pytest.mark.soak
@DEVICES
def test_all_can_be_launched(arch: int, record_property: Callable[[str, object], None]) -> None:
    """Every configuration."""
    done = compiled("--all", str(arch))
    record_property("table", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"sm_{arch} ") > 180


def test_what_must_not_be_launched_is_told() -> None:
    """Spills, too much shared memory, and a kernel that the compiler has emptied."""
    assert Usage(255, 0, 160 * 1024).problems(80) == []
    assert Usage(128, 8, 0).problems(80) == []
    assert Usage(255, 8, 0).problems(90) == ["spills 8 bytes"]
    assert Usage(168, 16, 0).problems(90) == ["spills 16 bytes"]
    assert Usage(32, 0, 164 * 1024).problems(80) == ["needs 167936 bytes of shared memory of 166912"]
    assert Usage(4, 0, 0).problems(100) == ["4 registers: there is no kernel"]


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """A device that is none of them; the interpreter, with which nothing can be compiled."""
    with pytest.raises(SystemExit):
        main(["75"])
    assert "arch [75]: give some of [80, 90, 100]" in capsys.readouterr().err
    if INTERPRETED:
        with pytest.raises(SystemExit):
            main(["90"])
        assert "TRITON_INTERPRET is set" in capsys.readouterr().err
