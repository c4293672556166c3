"""The disk tier: KV blocks that outlive the process, shared by all processes that use one directory.

Never wrong, never in the way: whatever is missing, damaged, foreign or unreadable is as if it had not been stored, and
a disk that cannot be written to is left alone for a while. Each such thing is logged once, none raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreword.kv.disk.files import SegmentFiles
from foreword.kv.disk.format import (
    TOKEN_BYTES,
    DamagedSegmentError,
    ForeignSegmentError,
    Geometry,
    Payload,
    block_keys,
    header_bytes,
    pack_tokens,
    split_blocks,
    unpack_tokens,
)
from foreword.kv.disk.index import BlockIndex, Place, Segment
from foreword.kv.disk.writer import Job, SegmentWriter

logger = logging.getLogger("foreword")

SEGMENT_BYTES = 16 << 20  # enough for a disk's full speed, little enough to evict one by one
TOUCH_SECONDS = 30.0  # a file in use is marked as used that often
SETTLED_NS = 2_000_000_000  # a folder changed within this time may change again without showing it
SCAN_SHARE = 20  # looking at the folder takes at most one part in so many of the time


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A stored block. Read it soon: it may be evicted, and is then as good as never stored.

    Attributes:
        place: where it is.
        num_tokens: how many of its first tokens are those looked up; a whole block, unless it is the last of a match.
    """

    place: Place
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DiskStats:
    """What is stored, and counts since the tier was opened.

    Attributes:
        blocks: known blocks of this namespace.
        bytes: size of their files.
        hits: blocks read.
        writes: blocks written.
        dropped: blocks not written, because too much was waiting or the disk refused.
        evictions: files that this process removed to stay within the cap.
        corrupt: files found damaged.
    """

    blocks: int
    bytes: int
    hits: int
    writes: int
    dropped: int
    evictions: int
    corrupt: int


class DiskTier:
    """Blocks of one namespace in a directory. Any thread may call any method; writing has a thread of its own.

    Args:
        directory: shared by namespaces and processes; made on the first write. Only its user may read the files.
        namespace: 32 bytes, see ``Namespace.key``. Namespaces share no file, nor do the salts that are part of them.
        block_bytes: bytes of one block.
        block_size: tokens per block.
        max_bytes: cap over all namespaces and processes; the files used least recently go first.
        writer: shared with other namespaces, and closed by whoever made it, who passes on to :meth:`forget` what it
            evicts; None makes one.

    Raises:
        ValueError: ``max_bytes`` does not hold a single block.
    """

    def __init__(
        self,
        directory: Path,
        namespace: bytes,
        block_bytes: int,
        block_size: int,
        max_bytes: int,
        writer: SegmentWriter | None = None,
    ) -> None:
        smallest = header_bytes(1, block_size) + block_bytes
        if max_bytes < smallest:
            raise ValueError(f"max_bytes is {max_bytes}, and one block takes {smallest}: give the disk tier more")
        self._geometry = Geometry(namespace, block_size, block_bytes)
        self._files = SegmentFiles(Path(directory), self._geometry, max_bytes)
        self._writer = writer or SegmentWriter(self.forget)
        self._segment_blocks = max(1, min(SEGMENT_BYTES, max_bytes // 8) // block_bytes)
        self._lock = threading.Lock()  # for what follows; never held during input or output
        self._index = BlockIndex()
        self._warned: set[str] = set()
        self._refused: set[tuple[str, int]] = set()  # names and inodes of files that stay where they are, unused
        self._hits = self._evictions = self._corrupt = 0
        self._scanning = threading.Lock()
        self._stamp = -1  # the folder's when it was last looked at; -1: look again
        self._next_scan = 0.0
        if writer is None:  # else whoever made it has cleaned up
            try:
                self._files.clean()
            except OSError as error:
                self._warn(str(self._files.directory), error)
        self._scan()

    @property
    def stats(self) -> DiskStats:
        with self._lock:
            size = sum(s.offset + len(s.keys) * self._geometry.block_bytes for s in self._index.segments.values())
            counts = (self._writer.written, self._writer.dropped, self._evictions, self._corrupt)
            return DiskStats(len(self._index), size, self._hits, *counts)

    def lookup(self, tokens: Sequence[int], start: int, limit: int) -> list[BlockRef]:
        """The longest stored run of ``tokens[start:limit]``, block by block; ``start`` is a block border.

        The match may end inside a block, like one in memory: the last reference then says how many of its tokens it is
        good for. Tokens are compared; what comes before a block is known by a cryptographic digest of its tokens.
        """
        parent = self._key(tokens, start)
        wanted = split_blocks(pack_tokens(tokens[start:limit]), self._geometry.block_size)
        found = self._match(parent, wanted)
        complete = len(found) == len(wanted) and (not wanted or found[-1].num_tokens * TOKEN_BYTES == len(wanted[-1]))
        return found if complete or not self._scan() else self._match(parent, wanted)

    def behind(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that are stored behind ``tokens``."""
        border = len(tokens) // self._geometry.block_size * self._geometry.block_size
        parent = self._key(tokens, border)
        with self._lock:
            return unpack_tokens(self._index.behind(parent, pack_tokens(tokens[border:]), count * TOKEN_BYTES))

    def read(self, ref: BlockRef, into: bytearray | memoryview | None = None) -> memoryview | None:
        """The content of a block, checked, in ``into`` or in new memory.

        Returns:
            None if the file has gone or is damaged; the block is then forgotten, and the match ends before it.
        """
        segment = ref.place.segment
        view = memoryview(bytearray(self._geometry.block_bytes) if into is None else into).cast("B")
        if view.nbytes != self._geometry.block_bytes:
            raise ValueError(f"into has {view.nbytes} bytes, and a block {self._geometry.block_bytes}: give it as many")
        try:
            self._files.read(ref.place, view)
        except (DamagedSegmentError, OSError) as error:
            with self._lock:
                self._index.remove(segment)
            self._reject(segment.name, segment.inode, error)
            return None
        with self._lock:
            self._hits += 1
        self._touch(segment)
        return view

    def covered(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` are stored or about to be: what follows is worth a ``write``.

        It counts as a use: a beginning that is always found in memory is never read, and still wanted after a restart.
        """
        blocks = split_blocks(pack_tokens(tokens), self._geometry.block_size)
        parent, covered, last = self._geometry.root, 0, None
        with self._lock:
            for block, key in zip(blocks, block_keys(parent, blocks), strict=True):
                if not self._has(parent, block, key):
                    break
                covered += len(block) // TOKEN_BYTES
                last, parent = self._index.get(key) or last, key
        if last is not None:
            self._touch(last.segment)
        return covered

    def write(self, tokens: Sequence[int], start: int, payloads: Sequence[Payload]) -> bool:
        """Store the blocks of ``tokens[start:]`` soon; ``start`` is a block border, the last block may be part-filled.

        Blocks that are stored already are skipped. Nobody may change the payloads any more. Slots of a part-filled
        block that hold no token are stored as they are: clear them, lest they hold what somebody else computed.

        Returns:
            Whether all were accepted: False when too much is waiting, the disk refuses, or the tier is closed.
        """
        size = self._geometry.block_size
        blocks = split_blocks(pack_tokens(tokens[start:]), size)
        if len(blocks) != len(payloads):
            raise ValueError(f"{len(payloads)} payloads for the {len(blocks)} blocks of tokens[{start}:{len(tokens)}]")
        for bytes_ in {memoryview(payload).nbytes for payload in payloads} - {self._geometry.block_bytes}:
            raise ValueError(f"a payload has {bytes_} bytes, and a block {self._geometry.block_bytes}")
        parents = [self._key(tokens, start)]
        parents += block_keys(parents[0], blocks)
        keys = parents[1:]
        with self._lock:
            missing = [i for i, key in enumerate(keys) if not self._has(parents[i], blocks[i], key)]
        jobs = [
            Job(
                self._files,
                self._stored,
                parents[a],
                start // size + a,
                blocks[a:b],
                keys[a:b],
                list(payloads[a:b]),
            )
            for a, b in self._cut(missing, blocks)
        ]
        return self._writer.put(jobs)

    def flush(self) -> None:
        """Wait until all that was accepted is written or given up."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is waiting, then stop. What is stored can still be read."""
        self._writer.close()

    def _key(self, tokens: Sequence[int], start: int) -> bytes:
        """The key of the block before ``start``."""
        size = self._geometry.block_size
        if start % size or not 0 <= start <= len(tokens):
            raise ValueError(f"start is {start}: it must be a multiple of {size} within the {len(tokens)} tokens")
        blocks = split_blocks(pack_tokens(tokens[:start]), size)
        return block_keys(self._geometry.root, blocks)[-1] if blocks else self._geometry.root

    def _match(self, parent: bytes, wanted: list[bytes]) -> list[BlockRef]:
        found = []
        with self._lock:
            for block in wanted:
                place, common = self._index.child(parent, block)
                if place is None:
                    break
                found.append(BlockRef(place, common))
                if common < self._geometry.block_size:
                    break
                parent = place.key
        return found

    def _has(self, parent: bytes, block: bytes, key: bytes) -> bool:
        """Whether a block, or a fuller one, is stored or about to be."""
        if key in self._index or key in self._writer:
            return True
        part_filled = len(block) < self._geometry.block_size * TOKEN_BYTES
        return part_filled and self._index.child(parent, block)[1] * TOKEN_BYTES == len(block)

    def _cut(self, missing: list[int], blocks: list[bytes]) -> list[tuple[int, int]]:
        """``missing`` as ranges of neighbours, none too large; a part-filled block is a range of its own."""
        ranges: list[tuple[int, int]] = []
        for i in missing:
            first, end = ranges[-1] if ranges else (-1, -1)
            part_filled = len(blocks[i]) < self._geometry.block_size * TOKEN_BYTES
            if i == end and end - first < self._segment_blocks and not part_filled:
                ranges[-1] = (first, i + 1)
            else:
                ranges.append((i, i + 1))
        return ranges

    def _scan(self) -> bool:
        """Learn what other processes stored and removed, if the folder has changed; whether it was looked at."""
        began = time.monotonic()
        if began < self._next_scan or not self._scanning.acquire(blocking=False):
            return False
        try:
            now, stamp = time.time_ns(), self._files.stamp()
            if stamp == self._stamp:
                return False
            self._compare()
            self._stamp = stamp if now - stamp > SETTLED_NS else -1
            self._next_scan = time.monotonic() + SCAN_SHARE * (time.monotonic() - began)
            return True
        except OSError as error:
            self._warn(str(self._files.directory), error)
            return False
        finally:
            self._scanning.release()

    def _compare(self) -> None:
        """Bring the index up to date with the folder."""
        with self._lock:
            known = dict(self._index.segments)  # before the names: what is published in between is not missing
        names = self._files.names()
        with self._lock:
            for name, segment in known.items():
                if name not in names:
                    self._index.remove(segment)
        for name, inode in names.items():
            if name not in known and (name, inode) not in self._refused:
                try:
                    self._add(self._files.load(name, inode))
                except (DamagedSegmentError, ForeignSegmentError, OSError) as error:
                    self._reject(name, inode, error)

    def _add(self, segment: Segment) -> None:
        """A segment was found or written."""
        with self._lock:
            superseded = None if segment.name in self._index.segments else self._index.add(segment)
        if superseded is not None:
            self._files.remove(superseded.name)

    def _stored(self, segment: Segment) -> None:
        self._add(segment)
        self._touch(segment)

    def forget(self, names: list[str]) -> None:
        """Files were evicted."""
        with self._lock:
            self._evictions += len(names)
            for name in names:
                if (segment := self._index.segments.get(name)) is not None:
                    self._index.remove(segment)

    def _reject(self, name: str, inode: int, error: Exception) -> None:
        """A file is of no use. If it is one of ours and damaged it goes, so that nobody else stumbles over it."""
        if isinstance(error, FileNotFoundError):
            return
        damaged = isinstance(error, DamagedSegmentError)
        removed = damaged and self._files.remove(name)
        with self._lock:
            self._corrupt += damaged
            if not removed:
                self._refused.add((name, inode))
        self._warn(str(self._files.folder / name), error)

    def _touch(self, segment: Segment) -> None:
        """Mark a segment and all before it as used, now and then: a beginning is never older than what follows it."""
        now = time.monotonic()
        if now - segment.touched < TOUCH_SECONDS:
            return
        with self._lock:
            path = self._index.path(segment)
            for step in path:
                step.touched = now
        self._files.touch(step.name for step in path)

    def _warn(self, path: str, error: Exception) -> None:
        """Log, once, that something in the directory cannot be used."""
        with self._lock:
            known = path in self._warned
            self._warned.add(path)
        if not known:
            logger.warning("disk cache: %s is not used, what it held is computed again: %s", path, error)
