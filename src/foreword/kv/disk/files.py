"""The disk tier's directory: reading, publishing, ageing and removing segment files.

Every namespace and geometry has a folder of its own; the size cap is over all of them. What keeps several processes
and ``kill -9`` from doing harm:

- A file appears by ``rename``, complete, and is never changed afterwards.
- A file that is being written has a temporary name, its final size and a lock from the start. So others count it, and
  know it for abandoned once the lock can be had: the system lets go of a dead process's locks.
- Content is flushed to the device before the rename; the rename itself is not. A loss of power may cost files. Should
  it tear one nevertheless, the checksums tell.

Blocks are read into memory of the caller, not mapped: what was checked stays what it was, and a device error or a file
that somebody cuts is an error to handle, where touching a map would end the process. At the checksum's speed the copy
hardly shows, and mapping costs page faults instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from foreword.kv.disk.format import (
    SUFFIX,
    VERSION,
    DamagedSegmentError,
    ForeignSegmentError,
    Geometry,
    Payload,
    checksum,
    decode_header,
    first_block,
    probe_header,
)
from foreword.kv.disk.index import Place, Segment

_TEMPORARY = ".tmp"
_ABANDONED_SECONDS = 86_400.0  # for a temporary file, where the file system has no locks


class SegmentFiles:
    """The files of one namespace and geometry, within a directory that others share.

    Args:
        directory: of all namespaces; made on the first write.
        max_bytes: how much all of them may hold.
    """

    def __init__(self, directory: Path, geometry: Geometry, max_bytes: int) -> None:
        self.directory = directory
        self.geometry = geometry
        self.max_bytes = max_bytes
        self.folder = directory / f"v{VERSION}-{geometry.root.hex()[:32]}"

    def stamp(self) -> int:
        """A number that changes when files come or go; 0 without a folder."""
        try:
            return self.folder.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def names(self) -> dict[str, int]:
        """The names of all files that look like segments, and their inodes."""
        try:
            with os.scandir(self.folder) as entries:
                return {entry.name: entry.inode() for entry in entries if entry.name.endswith(SUFFIX)}
        except FileNotFoundError:
            return {}

    def load(self, name: str, inode: int) -> Segment:
        """What a file says about itself. Raises ``DamagedSegmentError``, ``ForeignSegmentError`` or ``OSError``."""
        with open(self.folder / name, "rb", buffering=0, opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ForeignSegmentError("it is not a regular file")
            content = bytearray(min(probe_header(b""), status.st_size))
            _fill(file.fileno(), memoryview(content))
            missing = min(probe_header(content), status.st_size) - len(content)
            if missing > 0:
                content += bytes(missing)
                _fill(file.fileno(), memoryview(content)[-missing:])
        header = decode_header(self.geometry, name, bytes(content), status.st_size)
        return Segment(name, inode, header, self.geometry.block_size, probe_header(content))

    def read(self, place: Place, into: memoryview) -> None:
        """Read one block. Raises ``DamagedSegmentError`` or ``OSError``; ``into`` is then undefined."""
        segment = place.segment
        with open(self.folder / segment.name, "rb", buffering=0, opener=_open_at_once) as file:
            file.seek(segment.offset + place.number * self.geometry.block_bytes)
            complete = _fill(file.fileno(), into)
        if not complete or checksum(place.key, into) != segment.checksums[place.number]:
            raise DamagedSegmentError("a block does not match its checksum" if complete else "it has been cut")

    @contextlib.contextmanager
    def temporary(self, size: int) -> Iterator[TemporaryFile]:
        """A file under a temporary name, of its final size and locked; gone afterwards unless it was published."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        file = TemporaryFile(self.folder)
        try:
            os.ftruncate(file.descriptor, size)
            yield file
        finally:
            os.close(file.descriptor)
            self.remove(file.path.name)

    def make_room(self) -> list[str]:
        """Remove the files used least recently, until all that are left fit.

        Among files that were last used together, which is what sequences that share a beginning do to it, those
        deeper in their sequence go first.

        Returns:
            Their names.

        Raises:
            OSError: the rest does not fit either, and cannot be removed.
        """
        files, total = [], 0
        for folder in self._folders():
            for entry in _entries(folder):
                depth = first_block(entry.name)
                if depth is None and not entry.name.endswith(_TEMPORARY):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    total += status.st_size
                    if depth is not None:
                        files.append((status.st_mtime_ns, -depth, status.st_size, entry.path))
        if total > self.max_bytes:
            total -= self.clean()
        removed: list[str] = []
        for *_, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            if _remove(path):
                removed.append(os.path.basename(path))
                total -= size
        if total > self.max_bytes:
            raise OSError(errno.ENOSPC, f"{total} bytes are in use, max_bytes is {self.max_bytes}, nothing can go")
        return removed

    def clean(self) -> int:
        """Remove temporary files that no living process writes. Returns their bytes."""
        freed = 0
        for folder in self._folders():
            for entry in _entries(folder):
                if entry.name.endswith(_TEMPORARY):
                    with contextlib.suppress(OSError):  # gone, alive, or not ours to remove
                        freed += _remove_abandoned(entry.path)
        return freed

    def touch(self, names: Iterable[str]) -> None:
        """Mark files as used now, all with the same time."""
        now = time.time_ns()
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self.folder / name, ns=(now, now))

    def remove(self, name: str) -> bool:
        """Remove a file; whether it is gone."""
        return _remove(self.folder / name)

    def _folders(self) -> list[str]:
        """The folders of all namespaces, of other versions too."""
        return [
            entry.path
            for entry in _entries(str(self.directory))
            if entry.name.startswith("v") and entry.is_dir(follow_symlinks=False)
        ]


class TemporaryFile:
    """A file that is being written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.descriptor = -1
        while self.descriptor < 0:
            self.path = folder / f".{secrets.token_hex(16)}{_TEMPORARY}"
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with contextlib.suppress(OSError):  # without locks, age tells
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                self.descriptor = descriptor
            else:  # another process took it for abandoned before it was locked
                os.close(descriptor)

    def publish(self, name: str, parts: Sequence[Payload]) -> int:
        """Write the content, see it safely stored, and give the file its name. Returns its inode."""
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[os.write(self.descriptor, view) :]
        os.fsync(self.descriptor)
        os.rename(self.path, self.path.with_name(name))
        return os.fstat(self.descriptor).st_ino


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _remove(path: str | Path) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _remove_abandoned(path: str) -> int:
    """Remove a temporary file. Raises ``OSError`` if its writer lives; returns its bytes."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            if time.time() - status.st_mtime < _ABANDONED_SECONDS:
                raise
        os.unlink(path)
        return status.st_size
    finally:
        os.close(descriptor)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of what turns out to be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _fill(descriptor: int, into: memoryview) -> bool:
    """Read until ``into`` is full; False at the end of the file."""
    while into:
        count = os.readv(descriptor, [into])
        if not count:
            return False
        into = into[count:]
    return True
