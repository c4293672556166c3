"""What the disk tier's tests share: contents that follow from the tokens, and processes that write them.

Run as a program it is a writer: ``disk_support.py DIRECTORY SEED`` writes sequence after sequence until it is killed;
with a third argument, a function of ``os`` and a number, it kills itself at that call.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from foreword.kv.disk.tier import BlockRef, DiskTier

BLOCK = 4  # tokens
SLOT = 1024  # bytes per token
CAP = 2 << 20
NAMESPACE = bytes(range(32))


def contents(tokens: Sequence[int], start: int = 0) -> list[bytes]:
    """The blocks of ``tokens[start:]``: a slot's bytes depend on all tokens up to its own, empty slots are zero."""
    running, slots = hashlib.sha256(), []
    for token in tokens:
        running.update(token.to_bytes(4, "little"))
        slots.append(running.digest() * (SLOT // 32))
    blocks = [b"".join(slots[i : i + BLOCK]) for i in range(start, len(tokens), BLOCK)]
    return [block.ljust(BLOCK * SLOT, b"\0") for block in blocks]


def open_tier(directory: Path, namespace: bytes = NAMESPACE, max_bytes: int = CAP) -> DiskTier:
    return DiskTier(directory, namespace, BLOCK * SLOT, BLOCK, max_bytes)


def store(tier: DiskTier, tokens: Sequence[int], start: int = 0) -> bool:
    """Write and wait."""
    accepted = tier.write(tokens, start, contents(tokens, start))
    tier.flush()
    return accepted


def matched(refs: Sequence[BlockRef]) -> int:
    return sum(ref.num_tokens for ref in refs)


def read_checked(tier: DiskTier, tokens: Sequence[int], start: int = 0) -> int:
    """How many of ``tokens[start:]`` can be had; raises ``AssertionError`` if a byte of them is not what it must be."""
    good = 0
    expected = contents(tokens, start)
    for ref, block in zip(tier.lookup(tokens, start, len(tokens)), expected, strict=False):
        payload = tier.read(ref)
        if payload is None:
            break
        assert payload[: ref.num_tokens * SLOT] == block[: ref.num_tokens * SLOT], "wrong bytes"
        good += ref.num_tokens
    return good


def files(directory: Path, suffix: str = ".kv") -> list[Path]:
    return sorted(directory.glob(f"*/*{suffix}"), key=lambda path: path.name)


def temporaries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/.*.tmp"))


def sequence(seed: int, number: int) -> list[int]:
    """Sequences with common beginnings, of up to 30 blocks."""
    rng = random.Random(seed * 1_000_003 + number)
    beginning = random.Random(rng.randrange(8)).choices(range(50_000), k=40)
    return beginning[: rng.randrange(41)] + rng.choices(range(3), k=rng.randrange(1, 80))


def start_writer(directory: Path, seed: int, *dies_at: str) -> subprocess.Popen[bytes]:
    """A writing process; it has begun to write when this returns."""
    import foreword

    environment = os.environ | {"PYTHONPATH": str(Path(foreword.__file__).parents[1])}
    command = [sys.executable, __file__, str(directory), str(seed), *dies_at]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def die_at(function: str, call: int) -> None:
    """This process is killed when it calls ``os.<function>`` for the ``call``-th time."""
    original, calls = getattr(os, function), count()

    def deadly(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(os, function, deadly)


def main() -> None:
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    tier = open_tier(directory)
    print("ready", flush=True)
    if len(sys.argv) > 3:
        die_at(sys.argv[3], int(sys.argv[4]))
    for number in count():
        tokens = sequence(seed, number)
        start = tier.covered(tokens) // BLOCK * BLOCK
        tier.write(tokens, start, contents(tokens, start))
        if number % 4 == 3:
            tier.flush()


if __name__ == "__main__":
    main()
