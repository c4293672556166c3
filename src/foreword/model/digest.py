"""Which weights a checkpoint directory holds."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from foreword.core.errors import ModelLoadError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def fingerprint(directory: Path) -> str:
    """A digest of the checkpoint that changes when another one is put in its place: SHA-256 over config.json and each
    safetensors file's name, size, header and a sample of its data. Cheap: no file is read whole.

    Raises:
        ModelLoadError: a file is missing or unreadable.
    """
    return _digest(directory, _sample)


def full_digest(directory: Path, remembered: Path) -> str:
    """SHA-256 over config.json and every byte of the weights: what must not be mixed up even on disk.

    A gigabyte takes one to two seconds, so the digest of a file is kept in ``remembered`` with its path, size, inode
    and time of change, and found there the next time.

    Raises:
        ModelLoadError: a file is missing or unreadable.
    """
    return _digest(directory, lambda file: [_file_digest(file, remembered).encode()])


def _digest(directory: Path, parts: Callable[[Path], Iterable[bytes]]) -> str:
    """SHA-256 over config.json and, of each file of weights, its name and ``parts`` of it."""
    directory = Path(directory)
    digest = hashlib.sha256()
    try:
        digest.update((directory / "config.json").read_bytes())
        for file in weight_files(directory):
            digest.update(f"\0{file.name}\0".encode())
            for part in parts(file):
                digest.update(part)
    except OSError as error:
        raise ModelLoadError(f"{directory}: cannot be read: {error}") from error
    return digest.hexdigest()


def _sample(file: Path) -> Iterator[bytes]:
    """Size, header, and 64 pieces of the data."""
    size = file.stat().st_size
    yield f"{size}\0".encode()
    with file.open("rb") as stream:
        head = stream.read(8)
        length = min(int.from_bytes(head, "little"), size)
        yield head + stream.read(length)
        for position in range(8 + length, size, max(4096, (size - length) // 64)):
            stream.seek(position)
            yield stream.read(4096)


def _file_digest(file: Path, remembered: Path) -> str:
    status = file.stat()
    path = str(file.resolve())
    state = [path, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    note = remembered / f"sha256-{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["state"] == state and isinstance(known["sha256"], str):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not one of ours: read the file
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    try:
        remembered.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=remembered, delete=False, encoding="utf-8") as written:
            json.dump({"state": state, "sha256": found}, written)
        os.replace(written.name, note)
    except OSError:
        pass  # the next start reads the file again
    return found


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files, in a fixed order."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise ModelLoadError(f"{directory}: holds neither {_SINGLE} nor {_INDEX}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index}: cannot be read as a safetensors index: {error!r}") from error
    for name in names:
        if not (directory / name).is_file():
            raise ModelLoadError(f"{directory / name}: is missing, though {_INDEX} names it")
    return [directory / name for name in names]
