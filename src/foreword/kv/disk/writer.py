"""The disk tier's writing thread and what waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from foreword.kv.disk.files import SegmentFiles
from foreword.kv.disk.format import Header, Payload, checksum, encode_header
from foreword.kv.disk.index import Segment

logger = logging.getLogger("foreword")

QUEUE_BYTES = 512 << 20  # what may wait to be written
PAUSE_SECONDS = 60.0  # after a failed write


class Job(NamedTuple):
    """Blocks that will be one segment.

    Attributes:
        files: where to.
        stored: called in the writing thread with the segment once it is published.
    """

    files: SegmentFiles
    stored: Callable[[Segment], None]
    parent: bytes
    first_block: int
    blocks: list[bytes]
    keys: list[bytes]
    payloads: list[Payload]


class SegmentWriter:
    """Writes segments one after another. When too much waits or the disk refuses, blocks are dropped and counted.

    Args:
        evicted: called in the writing thread with the names of files, of any namespace, that had to go for a segment.
    """

    def __init__(self, evicted: Callable[[list[str]], None]) -> None:
        self._evicted = evicted
        self.written = self.dropped = 0  # blocks
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._unwritten: set[bytes] = set()  # keys of the blocks that wait or are being written
        self._unwritten_bytes = 0
        self._thread: threading.Thread | None = None
        self._paused_until = 0.0
        self._failing = False  # since the last success; it was logged
        self._closed = False

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is about to be written."""
        return key in self._unwritten

    def put(self, jobs: list[Job]) -> bool:
        """Take on jobs that follow one another. Once one must be dropped so are the rest, which nobody would find."""
        with self._changed:
            for number, job in enumerate(jobs):
                if not self._accepts(job):
                    self.dropped += sum(len(rest.keys) for rest in jobs[number:])
                    return False
                self._queue.append(job)
                self._unwritten.update(job.keys)
                self._unwritten_bytes += _size(job)
            if self._queue and self._thread is None:
                thread = threading.Thread(target=self._run, name="foreword-disk-writer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads, or the interpreter ends
                    self._drop_queue()
                    return False
                self._thread = thread
            self._changed.notify_all()
            return True

    def flush(self) -> None:
        """Wait until all that was taken on is written or dropped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten)

    def close(self) -> None:
        """Write what waits, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _drop_queue(self) -> None:
        self.dropped += sum(len(job.keys) for job in self._queue)
        self._queue.clear()
        self._unwritten.clear()
        self._unwritten_bytes = 0

    def _accepts(self, job: Job) -> bool:
        if self._closed or time.monotonic() < self._paused_until:
            return False
        return not self._unwritten or self._unwritten_bytes + _size(job) <= QUEUE_BYTES

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                job = self._queue.popleft()
            written = time.monotonic() >= self._paused_until and self._write(job)
            with self._changed:
                self.written += len(job.keys) * written
                self.dropped += len(job.keys) * (not written)
                self._unwritten.difference_update(job.keys)
                self._unwritten_bytes -= _size(job)
                self._changed.notify_all()

    def _write(self, job: Job) -> bool:
        try:
            job.stored(self._publish(job))
        except Exception as error:  # whatever it is: the thread lives, and requests do without the disk
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            if not self._failing:
                trace = None if isinstance(error, OSError) else error
                message = "cannot write to the disk cache in %s, next attempt in %.0f s or later: %s"
                logger.warning(message, job.files.directory, PAUSE_SECONDS, error, exc_info=trace)
            self._failing = True
            return False
        self._failing = False
        return True

    def _publish(self, job: Job) -> Segment:
        geometry = job.files.geometry
        sums = tuple(checksum(key, payload) for key, payload in zip(job.keys, job.payloads, strict=True))
        header = Header(job.parent, job.first_block, b"".join(job.blocks), sums)
        name, head = encode_header(geometry, header)
        with job.files.temporary(len(head) + len(sums) * geometry.block_bytes) as file:
            self._evicted(job.files.make_room())
            inode = file.publish(name, [head, *job.payloads])
        return Segment(name, inode, header, geometry.block_size, len(head))


def _size(job: Job) -> int:
    return len(job.keys) * job.files.geometry.block_bytes
