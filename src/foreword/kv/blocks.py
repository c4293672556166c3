"""The ledger of KV blocks: which are free, how many sequences use each, which the prefix tree holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

_CHUNK = 4096  # blocks; chunks without a free block are passed over, so that a search in a full pool stays short
_FEW_RUNS = 1024


class BlockAllocator:
    """Hands out block numbers ``first .. first + num_blocks - 1``; knows counts only, never tokens or tensors.

    A block is free, held (by sequences alone) or cached (in the prefix tree, used by sequences or not)::

        free + held + cached == num_blocks        evictable == cached blocks that no sequence uses
    """

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_evictable = 0
        self._end = end = first + num_blocks
        self._free = bytearray(first) + b"\x01" * num_blocks  # searched for runs with bytearray.find
        self._free_in = [sum(self._free[start : start + _CHUNK]) for start in range(0, end, _CHUNK)]  # per chunk
        self._has_free = bytearray(count > 0 for count in self._free_in)
        self._cached = bytearray(end)
        self._users = [0] * end
        self._cursor = first  # where the next search for a run starts, past room left for growth

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def users(self, block: int) -> int:
        """How many sequences use ``block``."""
        return self._users[block]

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """``count`` free blocks for one sequence, in as few runs as possible. The caller has checked ``num_free``.

        Args:
            after: the sequence's last block; the run is continued behind it where that is free.
            room: further blocks the sequence may come to need; a new run is placed with that space behind it.
        """
        blocks: list[int] = []
        if after is not None:
            self._take(after + 1, self._free_length(after + 1, count), blocks)
        missing = count - len(blocks)
        if not missing:
            return blocks
        start = self._find_run(missing, room)
        if start is not None:
            self._take(start, missing, blocks)
            self._cursor = start + missing + room
            return blocks
        runs = islice(self._free_runs(), max(count, _FEW_RUNS))  # fragmented: the longest of them first
        for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
            self._take(start, min(end - start, count - len(blocks)), blocks)
            if len(blocks) == count:
                break
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence uses ``blocks``."""
        for block in blocks:
            self._users[block] += 1
            if self._users[block] == 1 and self._cached[block]:
                self.num_evictable -= 1

    def release(self, blocks: Iterable[int]) -> None:
        """One sequence fewer uses ``blocks``; those nobody holds become free."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._cached[block]:
                    self.num_evictable += 1
                else:
                    self._make_free(block)

    def cache(self, block: int) -> None:
        """The prefix tree takes ``block``, which a sequence uses."""
        self._cached[block] = 1
        self.num_cached += 1

    def uncache(self, block: int) -> None:
        """The prefix tree lets go of ``block``."""
        self._cached[block] = 0
        self.num_cached -= 1
        if self._users[block] == 0:
            self.num_evictable -= 1
            self._make_free(block)

    def check_integrity(self) -> None:
        """Recount everything. Raises ``AssertionError`` if a count or a state is wrong."""
        free = [b for b in range(self._end) if self._free[b]]
        cached = [b for b in range(self._end) if self._cached[b]]
        held = [b for b in range(self._end) if self._users[b] > 0 and not self._cached[b]]
        assert min(self._users, default=0) >= 0, "a block was released more often than it was used"
        assert len(free) + len(held) + len(cached) == self.num_blocks, "free + held + cached != total"
        assert (len(free), len(held), len(cached)) == (self.num_free, self.num_held, self.num_cached), "counts drifted"
        counts = [sum(self._free[start : start + _CHUNK]) for start in range(0, self._end, _CHUNK)]
        assert counts == self._free_in, "free blocks of a chunk miscounted"
        assert list(self._has_free) == [count > 0 for count in counts], "a chunk with free blocks would be passed over"
        assert self.num_evictable == sum(self._users[b] == 0 for b in cached), "evictable count drifted"

    def _make_free(self, block: int) -> None:
        self._free[block] = 1
        self.num_free += 1
        self._count_free(block // _CHUNK, 1)

    def _take(self, start: int, length: int, into: list[int]) -> None:
        if not length:
            return
        self._free[start : start + length] = bytes(length)
        self.num_free -= length
        for chunk in range(start // _CHUNK, (start + length - 1) // _CHUNK + 1):
            inside = min(start + length, (chunk + 1) * _CHUNK) - max(start, chunk * _CHUNK)
            self._count_free(chunk, -inside)
        for block in range(start, start + length):
            self._users[block] = 1
        into.extend(range(start, start + length))

    def _free_length(self, start: int, limit: int) -> int:
        """Free blocks side by side from ``start``, at most ``limit``."""
        end = self._free.find(b"\x00", start, start + limit)
        return (min(start + limit, self._end) if end < 0 else end) - start

    def _find_run(self, count: int, room: int) -> int | None:
        """Where ``count`` free blocks lie side by side, with ``room`` behind them if possible."""
        for size in (count + room, count):
            if size > self.num_free:
                continue
            for begin in (self._cursor, 0):
                start = self._find(b"\x01" * size, begin)
                if start is not None:
                    return start
        return None

    def _find(self, run: bytes, begin: int) -> int | None:
        for chunk in self._chunks_with_free(begin // _CHUNK):
            start = self._free.find(run, max(begin, chunk * _CHUNK), (chunk + 1) * _CHUNK + len(run) - 1)
            if start >= 0:
                return start
        return None

    def _free_runs(self) -> Iterator[tuple[int, int]]:
        """Free runs as (start, end); one that crosses chunks comes in parts."""
        pattern = re.compile(rb"\x01+")
        for chunk in self._chunks_with_free(0):
            for match in pattern.finditer(self._free, chunk * _CHUNK, (chunk + 1) * _CHUNK):
                yield match.span()

    def _chunks_with_free(self, first: int) -> Iterator[int]:
        chunk = self._has_free.find(1, first)
        while chunk >= 0:
            yield chunk
            chunk = self._has_free.find(1, chunk + 1)

    def _count_free(self, chunk: int, change: int) -> None:
        self._free_in[chunk] += change
        self._has_free[chunk] = self._free_in[chunk] > 0
