"""``kill -9`` at any instant over a whole engine that keeps its KV on disk: a later one goes on with it, or without."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine
from support import assert_idle, assert_same_bits, generate_recorded, random_ids

NewEngine = Callable[..., Engine]
KILLS = int(os.environ.get("FOREWORD_ENGINE_KILLS", "14"))
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
DISK_BYTES = 1_200_000  # some 60 blocks: not all that is asked for fits, so that there is eviction too

PROGRAM = """
import os, random, sys
sys.path.insert(0, sys.argv[1])
from foreword import Engine
from support import tiny_options
from faults.test_kill import DISK_BYTES, OPTIONS, PROMPTS

def write(seed):
    rng = random.Random(seed)
    options = tiny_options(blocks=rng.choice((12, 40, 256)), cache_dir=sys.argv[3], max_disk_cache=DISK_BYTES)
    engine = Engine(sys.argv[2], **options)
    while True:
        engine.generate(rng.choices(PROMPTS, k=rng.randint(1, 4)), **OPTIONS)
        print("answered", flush=True)

for line in sys.stdin:
    child = os.fork()
    if not child:
        write(int(line))
    print(child, flush=True)
    os.waitpid(child, 0)
"""
"""Imports once, then forks a child for each seed that it reads. A child answers prompts until it is killed."""


def _prompts() -> list[list[int]]:
    """Prompts that share beginnings, of lengths around the borders of blocks."""
    rng = random.Random(1)
    beginnings = [random_ids(seed, 100) for seed in range(4)]
    return [
        rng.choice(beginnings)[: rng.choice((0, 15, 16, 17, 48, 90))] + random_ids(100 + seed, rng.randint(1, 40))
        for seed in range(40)
    ]


PROMPTS = _prompts()


@pytest.fixture
def nursery(tiny_dir: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1]), str(tiny_dir), str(tmp_path / "kv")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def kill_one(nursery: subprocess.Popen[str], seed: int) -> None:
    """Start a writer and kill it behind some number of answers, and a moment later than that."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    rng = random.Random(seed)
    print(seed, file=nursery.stdin, flush=True)
    lines = iter(nursery.stdout.readline, "")
    awaited, child, answered = rng.choice((0, 1, 2, 5, 10, 20)), None, 0
    while child is None or answered < awaited:
        line = next(lines).strip()
        if line == "answered":
            answered += 1
        else:
            child = int(line)
    time.sleep(rng.random() * (0.02 if awaited else 0.1))  # without an answer: while it opens
    os.kill(child, signal.SIGKILL)


def test_killed_at_any_instant(nursery: subprocess.Popen[str], new_tiny: NewEngine, tmp_path: Path) -> None:
    """Every answer from what killed processes left is that of an engine which keeps nothing, to the bit."""
    directory, rng = tmp_path / "kv", random.Random(7)
    lonely = new_tiny(enable_prefix_caching=False)
    expected = [generate_recorded(lonely, [prompt], **OPTIONS)[0] for prompt in PROMPTS]
    options = {"cache_dir": directory, "max_disk_cache": DISK_BYTES}
    restored = 0
    engine = new_tiny(**options)
    for seed in range(KILLS):
        if seed % 3:  # else the one from before is still open while the next writer works and dies
            engine.close()
            kill_one(nursery, seed)
            engine = new_tiny(**options)
        else:
            kill_one(nursery, seed)
            engine.reset_prefix_cache()
        for number in rng.sample(range(len(PROMPTS)), 10):
            assert_same_bits(generate_recorded(engine, [PROMPTS[number]], **OPTIONS), [expected[number]])
        restored += assert_idle(engine).tokens_restored
    assert restored > 100 * KILLS
    engine.close()
    new_tiny(**options).close()
    assert not list(directory.glob("*/.*.tmp")), "what the dead were writing is still there"
    assert sum(file.stat().st_size for file in directory.glob("*/*")) <= DISK_BYTES
