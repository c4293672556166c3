"""A recorded trace of what was asked of the cache, without its text: written while an engine runs, read for a replay.

The first line says what the trace is of; each further line is one request that was admitted, written when it ended::

    {"foreword_cache_trace": 1, "block_size": 16, "num_blocks": 2048, "salt": "5f0c.."}
    {"at": 12.345, "namespace": "9a1b..", "priority": 0, "prompt": 812, "tokens": 856, "blocks": "d1f0.."}

``tokens`` counts the prompt and what was generated behind it, as far as it has KV. ``blocks`` holds 16 hexadecimal
digits for each whole block of them: a keyed 64-bit hash of the block's tokens and all before them, so that equal hashes
are equal prefixes. The key, ``salt``, is drawn anew for each file: tables made beforehand are of no use, and two traces
cannot be compared. Who has the file has the key, though, and can test a guess: whether a prompt that is known from its
first word on is in the trace. So it holds no text, but where prompts can be guessed whole it is no secret.
"""

from __future__ import annotations

import gzip
import json
import logging
import secrets
import time
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from foreword.core.validation import reject

logger = logging.getLogger("foreword")

VERSION = 1
_HASH_BYTES = 8
_BUFFERED_BYTES = 1 << 16


class TraceRecorder:
    """Appends to a trace. Lines wait in a buffer of 64 KiB at most; ``close`` writes the last of them.

    A file that is there already and is a trace of the same block size is continued, under its own key, as if the cache
    had lived on.
    An error while writing is logged once and ends the recording, never a request.

    Raises:
        ValueError: the file cannot be opened, or is something else.
    """

    def __init__(self, path: str, block_size: int, num_blocks: int) -> None:
        self._path = path
        self._block_size = block_size
        self._lines: list[bytes] = []
        self._buffered = 0
        self._to_wall_s = time.time() - time.monotonic()
        if path.endswith(".gz"):
            reject("cache_trace", path, "it is recorded uncompressed; give a name without .gz")
        try:
            found = _read_header(path) if Path(path).is_file() and Path(path).stat().st_size else None
            self._file: Any = open(path, "ab", buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:
            reject("cache_trace", path, f"it cannot be recorded to ({error}); give the path of a new file")
        if found is None:
            found = TraceHeader(block_size, num_blocks, secrets.token_hex(16))
            self._append({"foreword_cache_trace": VERSION, **found._asdict()})
        elif found.block_size != block_size:
            self._file.close()
            reject("cache_trace", path, f"it is a trace of blocks of {found.block_size} tokens, not {block_size}")
        elif not _ends_with_a_line(path):
            self._lines.append(b"\n")
        self._key = bytes.fromhex(found.salt)

    def record(
        self, namespace: bytes, tokens: list[int], *, num_prompt: int, admitted_s: float, priority: int = 0
    ) -> None:
        """Note a request that ended.

        Args:
            tokens: prompt and generated tokens, as far as they have KV.
            num_prompt: tokens that it looked up; 0 for a further completion of one prompt.
            admitted_s: when it was first given blocks, on the monotonic clock.
        """
        if self._file is None:
            return
        self._append(
            {
                "at": round(self._to_wall_s + admitted_s, 4),
                "namespace": self._hash(b"", namespace).hex(),
                "priority": priority,
                "prompt": num_prompt,
                "tokens": len(tokens),
                "blocks": b"".join(self._block_hashes(namespace, tokens)).hex(),
            }
        )
        if self._buffered > _BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits in the buffer."""
        lines, self._lines, self._buffered = self._lines, [], 0
        if not lines or self._file is None:
            return
        try:
            self._file.write(b"".join(lines))  # whole lines at once: two engines may append to one file
        except OSError as error:
            logger.warning("cache_trace=%r cannot be written (%s); the recording ends here", self._path, error)
            self._close_file()

    def close(self) -> None:
        """Write the rest and end the recording. May be called twice."""
        self.flush()
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._buffered += len(self._lines[-1])

    def _block_hashes(self, namespace: bytes, tokens: list[int]) -> Iterator[bytes]:
        before = namespace
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            before = self._hash(before, array("q", tokens[end - self._block_size : end]).tobytes())
            yield before

    def _hash(self, before: bytes, content: bytes) -> bytes:
        return blake2b(before + content, digest_size=_HASH_BYTES, key=self._key).digest()


class TraceHeader(NamedTuple):
    """Tokens per block, blocks of the pool that the trace was recorded with, and the key of its hashes."""

    block_size: int
    num_blocks: int
    salt: str


class TraceRequest(NamedTuple):
    """One line of a trace; ``blocks`` are its hashes as numbers, each standing for a block and all before it."""

    at: float
    namespace: bytes
    priority: int
    prompt: int
    tokens: int
    blocks: list[int]


class Trace(NamedTuple):
    """A trace as read, its requests in the order in which they were admitted."""

    header: TraceHeader
    requests: list[TraceRequest]


def read_trace(path: str) -> Trace:
    """Read a trace, compressed (``.gz``) or not. A line that was cut is left out.

    Raises:
        ValueError: the file is no trace, or a line in it is none of a trace; the message names file and line.
        OSError: it cannot be read.
    """
    header = _read_header(path)
    requests = []
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            try:
                if number > 1:
                    requests.append(_read_request(fields, header.block_size))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: line {number} is no request of a trace: {error!r}") from error
    return Trace(header, sorted(requests, key=lambda request: request.at))


def _read_request(fields: dict[str, Any], block_size: int) -> TraceRequest:
    packed = array("Q", bytes.fromhex(fields["blocks"]))
    prompt, tokens = int(fields["prompt"]), int(fields["tokens"])
    if len(packed) != tokens // block_size or not 0 <= prompt <= tokens:
        raise ValueError(f"{len(packed)} blocks, a prompt of {prompt} and {tokens} tokens do not go together")
    namespace = bytes.fromhex(fields["namespace"])
    return TraceRequest(float(fields["at"]), namespace, int(fields["priority"]), prompt, tokens, packed.tolist())


def _read_header(path: str) -> TraceHeader:
    try:
        with _open(path) as file:
            fields = json.loads(file.readline(1000))
        if fields["foreword_cache_trace"] != VERSION:
            raise ValueError(f"version {fields['foreword_cache_trace']!r}")
        header = TraceHeader(int(fields["block_size"]), int(fields["num_blocks"]), str(fields["salt"]))
        if header.block_size < 1 or header.num_blocks < 1 or len(bytes.fromhex(header.salt)) > 64:
            raise ValueError(f"{header}")
        return header
    except (EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no trace of version {VERSION} of the prefix cache ({error!r})") from error


def _ends_with_a_line(path: str) -> bool:
    """False when the last line was cut."""
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


def _open(path: str) -> Any:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")
