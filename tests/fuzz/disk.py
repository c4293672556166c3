"""Directories for the disk tier: what they may hold, and what happens to the disk under them."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foreword.kv.disk import files, tier, writer
from foreword.kv.tier import Tier

_WRITES = ("makedirs", "ftruncate", "write", "fsync", "rename", "unlink", "utime")

FAULTS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "full": (("write",), errno.ENOSPC, 1),
    "full at once": (("ftruncate",), errno.ENOSPC, 1),
    "full at fsync": (("fsync",), errno.ENOSPC, 1),
    "full at rename": (("rename",), errno.ENOSPC, 1),
    "full for long": (("write", "fsync"), errno.ENOSPC, 9),
    "device error": (("readv",), errno.EIO, 2),
    "unreadable": (("open",), errno.EACCES, 3),
    "no listing": (("scandir",), errno.EIO, 2),
    "read-only": (_WRITES, errno.EROFS, 30),
    "slow": ((*_WRITES, "readv"), 0, 12),
    "short": (("write", "readv"), -1, 6),
}
"""By name: the functions of ``os`` that are concerned, the error (0: none, they are slow; -1: none, they do a part of
what they could), and how many calls of them."""

DAMAGE = ("truncated", "prolonged", "flipped", "emptied", "foreign", "another's", "vanished", "a directory", "all gone")


class FaultyOs:
    """``os`` as the disk tier's files see it. Nothing is flushed to a device: no test here cuts the power.

    Attributes:
        raised: errors so far.
    """

    def __init__(self) -> None:
        self.raised = 0
        self._lock = threading.Lock()
        self._armed: list[list[Any]] = []  # fault, calls before it, calls of it

    def arm(self, fault: str, after: int) -> None:
        """It befalls the calls behind the next ``after`` that it concerns."""
        with self._lock:
            self._armed.append([fault, after, FAULTS[fault][2]])

    def disarm(self) -> None:
        with self._lock:
            self._armed.clear()

    def __getattr__(self, name: str) -> Any:
        original = (lambda _: None) if name == "fsync" else getattr(os, name)
        return self._around(name, original) if callable(original) and self._armed else original

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            code = self._due(name)
            if code is None:
                return original(*args, **options)
            if code == 0:
                time.sleep(0.001)
            elif code > 0:
                self.raised += 1
                raise OSError(code, os.strerror(code))
            if code == -1 and name == "write":
                return original(args[0], args[1][: 1 + len(args[1]) // 2])
            if code == -1 and name == "readv":
                return original(args[0], [args[1][0][: 1 + len(args[1][0]) // 2]])
            return original(*args, **options)

        return call

    def _due(self, name: str) -> int | None:
        with self._lock:
            for armed in self._armed:
                names, code, _ = FAULTS[armed[0]]
                if name not in names:
                    continue
                if armed[1]:
                    armed[1] -= 1
                    continue
                armed[2] -= 1
                if not armed[2]:
                    self._armed.remove(armed)
                return code
        return None


@contextmanager
def faulty_disk() -> Iterator[FaultyOs]:
    """The disk tier on a faulty disk. It tries again at once after an error, looks at its folder every time, and is
    asked however slow it is: what it does depends on no clock."""
    disk: Any = FaultyOs()
    places: tuple[tuple[Any, str, Any], ...] = (
        (files, "os", disk), (writer, "PAUSE_SECONDS", 0.0), (tier, "SCAN_SHARE", 0),
        (Tier, "is_worth", lambda *_: True),
    )  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield disk
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class Kept:
    """A directory with everything that any engine on it was asked.

    Attributes:
        lives: engines that are open on it.
        faulty: whether the disk under it has faults.
        damaged: something was done to it that costs cached tokens.
    """

    def __init__(self, directory: Path, *, faulty: bool) -> None:
        self.directory = directory
        self.faulty = faulty
        self.lives: list[Any] = []
        self.damaged = False
        self._seen: dict[Hashable, set[int]] = {}

    def add(self, namespace: Hashable, tokens: Sequence[int]) -> None:
        """``tokens`` may be on disk."""
        seen, chain = self._seen.setdefault(namespace, set()), 0
        for token in tokens:
            chain = hash((chain, token))
            seen.add(chain)

    def longest(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` may be on disk."""
        seen, chain = self._seen.get(namespace, set()), 0
        for position, token in enumerate(tokens):
            chain = hash((chain, token))
            if chain not in seen:
                return position
        return len(tokens)

    def damage(self, rng: random.Random) -> str:
        """Do something to one file; says what."""
        self.damaged = True
        kind = rng.choice(DAMAGE)
        try:
            found = sorted(self.directory.glob("*/*.kv"))
            if not found:
                return "there is no file"
            file = rng.choice(found)
            _damage(rng, kind, file, rng.choice(found))
        except OSError as error:  # somebody else was quicker
            return f"{kind}: {error}"
        return f"{file.name[:16]} {kind}"


def _damage(rng: random.Random, kind: str, file: Path, other: Path) -> None:
    content = bytearray() if file.is_dir() else bytearray(file.read_bytes())
    if kind == "all gone":
        shutil.rmtree(file.parent, ignore_errors=True)
    elif kind == "vanished" or not content:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    elif kind == "a directory":
        file.unlink()
        file.mkdir()
    elif kind == "flipped":
        place = rng.randrange(len(content) * 8)
        with file.open("r+b") as stream:  # in place: an engine may have it open
            stream.seek(place // 8)
            stream.write(bytes([content[place // 8] ^ 1 << place % 8]))
    elif kind == "truncated":
        os.truncate(file, rng.randrange(len(content)))
    else:
        another = b"" if other.is_dir() else other.read_bytes()
        written = {"prolonged": bytes(content) + b"x", "emptied": b"", "foreign": rng.randbytes(5000)}
        file.write_bytes(written.get(kind, another))
