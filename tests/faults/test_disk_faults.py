"""The disk tier under faults: whatever happens to the disk or to a writer, no wrong byte is read and nothing raises."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disk_support import (
    BLOCK,
    CAP,
    NAMESPACE,
    SLOT,
    contents,
    files,
    matched,
    open_tier,
    read_checked,
    sequence,
    start_writer,
    store,
    temporaries,
)
from foreword.kv.disk import format as disk_format
from foreword.kv.disk import tier as disk
from foreword.kv.disk import writer as disk_writer
from foreword.kv.disk.tier import DiskTier

Patch = pytest.MonkeyPatch
Logs = pytest.LogCaptureFixture

TOKENS = list(range(100, 122))  # five blocks and a half: a file of five blocks and a file of one
KILLS = int(os.environ.get("FOREWORD_DISK_KILLS", "25"))


@pytest.fixture(autouse=True)
def warnings(caplog: Logs) -> Callable[[], list[str]]:
    """The warnings logged since last asked."""
    caplog.set_level(logging.WARNING, "foreword")

    def take() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    return take


Warnings = Callable[[], list[str]]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory in which ``TOKENS`` are stored."""
    directory = tmp_path / "cache"
    tier = open_tier(directory)
    store(tier, TOKENS)
    tier.close()
    return directory


def recovers(directory: Path, at_most: int, warnings: Warnings, *, fresh: bool) -> None:
    """A damaged file costs one warning and what it held; storing that again heals, for this process and the next."""
    damaged = files(directory)[0]
    tier = open_tier(directory)
    if fresh:
        assert len(warnings()) == 1
    for _ in range(3):
        assert read_checked(tier, TOKENS) <= at_most
    assert not damaged.exists()
    if not fresh:
        assert len(warnings()) == 1
    assert tier.stats.corrupt == 1
    store(tier, TOKENS)
    assert read_checked(tier, TOKENS) == 22
    assert read_checked(open_tier(directory), TOKENS) == 22
    assert warnings() == []
    tier.close()


HEADER = 4096
LONG = HEADER + 5 * BLOCK * SLOT


@pytest.mark.parametrize(
    "length", [0, 1, 7, 8, 100, 113, 200, 4095, 4096, 4097, LONG // 2, LONG - BLOCK * SLOT, LONG - 1]
)
def test_truncated(stored: Path, length: int, warnings: Warnings) -> None:
    """A file cut anywhere is refused when it is found."""
    os.truncate(files(stored)[0], length)
    recovers(stored, 0, warnings, fresh=True)


def test_prolonged(stored: Path, warnings: Warnings) -> None:
    """So is one to which something was added."""
    with files(stored)[0].open("ab") as file:
        file.write(b"x")
    recovers(stored, 0, warnings, fresh=True)


FIELDS = range(0, 130, 6)  # magic, version, geometry, namespace, parent, counts, first tokens


@pytest.mark.parametrize("offset", [*FIELDS, 200, 215, 1000, 4095])
def test_a_flipped_bit_in_the_header(stored: Path, offset: int, warnings: Warnings) -> None:
    """Every field, tokens, checksums and padding are covered by the name."""
    flip(files(stored)[0], offset, offset % 8)
    recovers(stored, 0, warnings, fresh=True)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 9000, 3 * 4096, 5 * 4096 - 1])
def test_a_flipped_bit_in_a_block(stored: Path, offset: int, warnings: Warnings) -> None:
    """Found when the block is read; blocks before it are good."""
    flip(files(stored)[0], HEADER + offset, offset % 8)
    recovers(stored, offset // (BLOCK * SLOT) * BLOCK, warnings, fresh=False)


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def test_random_damage_while_it_is_open(stored: Path, warnings: Warnings) -> None:
    """Bits flip and files shrink under an open tier: bytes are right or not there, one warning per file at most."""
    rng = random.Random(1)
    tier = open_tier(stored)
    for _ in range(150):
        path = rng.choice(files(stored))
        size = path.stat().st_size
        if rng.random() < 0.3:
            os.truncate(path, rng.randrange(size))
        else:
            flip(path, rng.randrange(size), rng.randrange(8))
        read_checked(tier, TOKENS)
        store(tier, TOKENS)
    assert tier.stats.corrupt > 50  # damage to a header that is in memory goes unnoticed, and matters to nobody
    assert len(warnings()) <= 2
    tier.close()


def renamed_segment(directory: Path, namespace: bytes = NAMESPACE, block_size: int = BLOCK) -> tuple[str, bytes]:
    """A file that is in order, but belongs elsewhere."""
    other = directory / "elsewhere"
    tier = DiskTier(other, namespace, BLOCK * SLOT, block_size, CAP)
    payloads = [bytes([i]) * (BLOCK * SLOT) for i in range(-(-len(TOKENS) // block_size))]
    tier.write(TOKENS, 0, payloads)
    tier.close()
    path = files(other)[0]
    content = path.read_bytes()
    shutil.rmtree(other)
    return path.name, content


def wrong_version(directory: Path) -> tuple[str, bytes]:
    with Patch.context() as patch:
        patch.setattr(disk_format, "VERSION", 2)
        return renamed_segment(directory)


def wrong_content(_: Path) -> tuple[str, bytes]:
    """A header that contradicts itself, under the name that belongs to it."""
    geometry = disk_format.Geometry(NAMESPACE, BLOCK, BLOCK * SLOT)
    return disk_format.encode_header(geometry, disk_format.Header(geometry.root, 0, bytes(4 * 9), (1, 2)))


FOREIGN: dict[str, Callable[[Path], tuple[str, bytes]]] = {
    "photo": lambda _: ("photo.kv", b"\x89PNG" * 5000),
    "empty": lambda _: ("empty.kv", b""),
    "version": wrong_version,
    "namespace": lambda directory: renamed_segment(directory, namespace=b"o" * 32),
    "geometry": lambda directory: renamed_segment(directory, block_size=8),
    "contradiction": wrong_content,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file(stored: Path, kind: str, warnings: Warnings) -> None:
    """What does not belong here is not used, named once, and left alone; the rest is used."""
    name, content = FOREIGN[kind](stored)
    path = files(stored)[0].with_name(name)
    path.write_bytes(content)
    tier = open_tier(stored)
    os.utime(path.parent)
    for _ in range(3):
        assert read_checked(tier, TOKENS) == 22
        assert tier.lookup([1, 2, 3], 0, 3) == []
    (message,) = warnings()
    assert str(path) in message
    assert path.read_bytes() == content
    assert tier.stats.corrupt == 0


def test_a_file_under_another_files_name(stored: Path, warnings: Warnings) -> None:
    """A name vouches for one content: a good file under another's name is damage."""
    long, short = files(stored)
    shutil.copy(short, long)
    recovers(stored, 0, warnings, fresh=True)


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_something_else_in_place_of_a_file(stored: Path, kind: str, warnings: Warnings) -> None:
    """Nothing waits for a pipe, nothing falls over a directory."""
    path = files(stored)[0]
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    tier = open_tier(stored)
    assert read_checked(tier, TOKENS) == 0
    assert read_checked(tier, TOKENS) == 0
    assert len(warnings()) == 1
    assert os.path.lexists(path)


def failing(number: int, path: str | None = None) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), path)

    return fail


def test_unreadable_files(stored: Path, warnings: Warnings, monkeypatch: Patch) -> None:
    """A file that may not be opened is passed over with one warning, and stays."""
    with monkeypatch.context() as patch:
        patch.setattr("foreword.kv.disk.files._open_at_once", failing(errno.EACCES))
        tier = open_tier(stored)
        assert read_checked(tier, TOKENS) == 0
        assert len(warnings()) == 2  # two files
    assert len(files(stored)) == 2
    assert read_checked(open_tier(stored), TOKENS) == 22


def test_a_device_error_while_reading(stored: Path, warnings: Warnings, monkeypatch: Patch) -> None:
    """The block is not there, one warning; the file stays, the device may recover."""
    tier = open_tier(stored)
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", failing(errno.EIO))
        assert read_checked(tier, TOKENS) == 0
        assert read_checked(tier, TOKENS) == 0
    assert len(warnings()) == 1
    assert len(files(stored)) == 2


def test_vanished_between_lookup_and_read(stored: Path, warnings: Warnings) -> None:
    """Evicted by somebody else: not there, without a word."""
    tier = open_tier(stored)
    refs = tier.lookup(TOKENS, 0, 22)
    shutil.rmtree(stored)
    assert [tier.read(ref) for ref in refs] == [None] * 6
    assert tier.lookup(TOKENS, 0, 22) == []
    store(tier, TOKENS)
    assert read_checked(tier, TOKENS) == 22
    assert warnings() == []
    tier.close()


@pytest.mark.parametrize("call", ["open", "ftruncate", "write", "fsync", "rename", "makedirs", "scandir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written(
    stored: Path, warnings: Warnings, monkeypatch: Patch, call: str, number: int
) -> None:
    """One warning, no temporary file, writing pauses; what is stored is read on; later it is tried again."""
    tier = open_tier(stored)
    other = [*TOKENS[:8], 1, 2, 3, 4]
    fail, attempts = failing(number), []
    with monkeypatch.context() as patch:
        original = getattr(os, call)

        def in_the_writer(*args: Any, **options: Any) -> Any:
            if threading.current_thread().name != "foreword-disk-writer":
                return original(*args, **options)
            attempts.append(args)
            return fail()

        patch.setattr(os, call, in_the_writer)
        assert store(tier, other)
        assert len(attempts) == 1
        assert not store(tier, other)
        assert len(attempts) == 1
        assert tier.covered(other) == 8
        monkeypatch.setattr(disk_writer, "PAUSE_SECONDS", 0.0)
        tier._writer._paused_until = 0.0
        assert store(tier, other)
        assert len(attempts) == 2
    (message,) = warnings()
    assert os.strerror(number) in message
    assert temporaries(stored) == []
    assert tier.stats.dropped == 3
    assert read_checked(tier, TOKENS) == 22
    assert store(tier, other)
    assert read_checked(tier, other) == 12
    tier.close()


def test_an_error_that_nobody_foresaw(stored: Path, warnings: Warnings, monkeypatch: Patch) -> None:
    """The writing thread outlives it."""
    tier = open_tier(stored)
    with monkeypatch.context() as patch:
        patch.setattr(disk_writer, "PAUSE_SECONDS", 0.0)
        patch.setattr(disk_writer, "encode_header", lambda *_: 1 // 0)
        store(tier, [1, 2, 3, 4])
    assert len(warnings()) == 1
    store(tier, [1, 2, 3, 4])
    assert read_checked(tier, [1, 2, 3, 4]) == 4
    tier.close()


def test_a_directory_that_is_a_file(tmp_path: Path, warnings: Warnings) -> None:
    """Nothing can be read or written: one warning for each."""
    path = tmp_path / "file"
    path.write_text("x")
    tier = open_tier(path)
    assert read_checked(tier, TOKENS) == 0
    store(tier, TOKENS)
    assert read_checked(tier, TOKENS) == 0
    assert len(warnings()) == 2
    assert path.read_text() == "x"
    tier.close()


def test_a_slow_disk_does_not_stop_lookups(stored: Path, monkeypatch: Patch) -> None:
    """While a read and a write hang, other lookups and reads of what they need go on."""
    tier = open_tier(stored)
    refs = tier.lookup(TOKENS, 0, 22)
    gate, waiting = threading.Event(), threading.Semaphore(0)
    read, make_room = tier._files.read, tier._files.make_room

    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            waiting.release()
            assert gate.wait(60)
            return original(*args)

        return wait

    monkeypatch.setattr(tier._files, "read", slow(read))
    monkeypatch.setattr(tier._files, "make_room", slow(make_room))
    results: list[memoryview | None] = []
    reader = threading.Thread(target=lambda: results.append(tier.read(refs[0])))
    reader.start()
    tier.write([5, 6, 7, 8], 0, contents([5, 6, 7, 8]))
    waiting.acquire()
    waiting.acquire()
    monkeypatch.setattr(tier._files, "read", read)
    assert read_checked(tier, TOKENS) == 22
    assert tier.lookup([5, 6, 7, 8], 0, 4) == []
    assert tier.covered([5, 6, 7, 8, 9]) == 4
    assert tier.stats.writes == 0
    assert not results
    gate.set()
    reader.join()
    tier.flush()
    assert results == contents(TOKENS)[:1]
    assert read_checked(tier, [5, 6, 7, 8]) == 4
    tier.close()


def test_temporary_files_of_living_writers_stay(stored: Path) -> None:
    """A start cleans up after the dead only; a writer whose file is removed all the same loses no more than that."""
    tier = open_tier(stored)
    dead = files(stored)[0].with_name(".0123.tmp")
    dead.write_bytes(bytes(100))
    with tier._files.temporary(1000) as file:
        open_tier(stored)
        assert temporaries(stored) == [file.path]
        assert file.path.stat().st_size == 1000  # others know how much it will take
    assert temporaries(stored) == []


def test_a_temporary_file_that_is_taken_before_it_is_locked(
    stored: Path, warnings: Warnings, monkeypatch: Patch
) -> None:
    """Another process may clean up in the instant between a file's creation and its lock: the writer makes another."""
    tier, flock, taken = open_tier(stored), fcntl.flock, temporaries(stored)

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.extend(temporaries(stored))
            taken[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    store(tier, [1, 2, 3, 4])
    assert len(taken) == 1
    assert read_checked(tier, [1, 2, 3, 4]) == 4
    assert warnings() == []
    tier.close()


def test_without_file_locks(stored: Path, monkeypatch: Patch) -> None:
    """On a file system that has none, writing works, and only age tells what is abandoned."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOTSUP))
    old, new = files(stored)[0].with_name(".0123.tmp"), files(stored)[0].with_name(".4567.tmp")
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1e9, 1e9))
    tier = open_tier(stored)
    assert temporaries(stored) == [new]
    store(tier, [1, 2, 3, 4])
    assert read_checked(tier, [1, 2, 3, 4]) == 4
    tier.close()


def test_abandoned_temporary_files_go_before_others(tmp_path: Path) -> None:
    """They count towards the cap, and are the first to go."""
    tier = open_tier(tmp_path, max_bytes=64 * 1024)
    store(tier, TOKENS)
    files(tmp_path)[0].with_name(".0123.tmp").write_bytes(bytes(60 * 1024))
    store(tier, [1, 2, 3, 4])
    assert temporaries(tmp_path) == []
    assert tier.stats.evictions == 0
    tier.close()


KILL_POINTS = [("ftruncate", 0), ("scandir", 1), *(("write", i) for i in range(4)), ("fsync", 0), ("rename", 0)]


@pytest.mark.parametrize(("function", "call"), [*KILL_POINTS, ("rename", 1), ("unlink", 0), ("utime", 0), ("close", 2)])
def test_killed_at_every_step(tmp_path: Path, function: str, call: int, warnings: Warnings) -> None:
    """A writer dies at a given call: whole files or none, and the next start leaves no trace of it."""
    process = start_writer(tmp_path, 1, function, str(call))
    assert process.wait(60) == -signal.SIGKILL
    before = files(tmp_path)
    assert len(temporaries(tmp_path)) == ((function, call) in [*KILL_POINTS, ("rename", 1)])
    tier = open_tier(tmp_path)
    found = sum(read_checked(tier, sequence(1, number)) > 0 for number in range(4))
    assert bool(found) == bool(before)
    assert temporaries(tmp_path) == []
    assert warnings() == []
    assert tier.stats.corrupt == 0


def test_killed_again_and_again(tmp_path: Path, warnings: Warnings) -> None:
    """Writers are killed at random instants, next to one that lives and a cap that evicts: nothing wrong is ever read.

    FOREWORD_DISK_KILLS sets how many are killed.
    """
    rng, found = random.Random(2), 0
    neighbour = start_writer(tmp_path, 10**6)
    try:
        for seed in range(KILLS):
            process = start_writer(tmp_path, seed)
            time.sleep(rng.random() * 0.1)
            process.kill()
            process.wait(60)
            tier = open_tier(tmp_path)
            for number in range(40):
                found += read_checked(tier, sequence(seed, number)) > 0
                found += read_checked(tier, sequence(rng.randrange(seed + 1), number)) > 0
            assert tier.stats.corrupt == 0
            tier.close()
    finally:
        neighbour.kill()
        neighbour.wait(60)
    tier = open_tier(tmp_path)
    assert temporaries(tmp_path) == []
    assert store(tier, TOKENS)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= CAP
    assert found > KILLS
    assert warnings() == []
    tier.close()


def test_two_writers_and_a_reader(tmp_path: Path, warnings: Warnings, monkeypatch: Patch) -> None:
    """Two processes write the same and different sequences into a small cap; a third reads meanwhile, always right."""
    monkeypatch.setattr(disk, "SCAN_SHARE", 0)
    writers = [start_writer(tmp_path, 1), start_writer(tmp_path, 1), start_writer(tmp_path, 2)]
    tier = open_tier(tmp_path)
    found = rounds = 0
    try:
        while rounds < 20 or (found < 200 and rounds < 5000):
            rounds += 1
            for number in range(30):
                found += read_checked(tier, sequence(1 + rounds % 2, number)) > 0
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(60)
    assert found >= 200
    assert tier.stats.corrupt == 0
    assert warnings() == []
    tier.close()
    assert matched(tier.lookup(TOKENS, 0, 22)) == 0
