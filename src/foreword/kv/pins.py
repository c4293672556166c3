"""Which cached prefixes stay whatever happens: a ledger of pins, the blocks under them, and when they lapse."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from foreword.kv.tree import Node


class PinKey(NamedTuple):
    """What a pin is known by.

    Attributes:
        renewed: it was made by a cache point, whose every use prolongs it; such pins and others do not mix.
    """

    namespace: bytes
    tokens: tuple[int, ...]
    renewed: bool = False


class PinsFullError(ValueError):
    """A pin would pass the cap.

    Attributes:
        needed: blocks that it would add.
        pinned: blocks under a pin already.
        most: blocks that may be pinned.
    """

    def __init__(self, needed: int, pinned: int, most: int) -> None:
        super().__init__(f"pins may hold {most} blocks, hold {pinned}, and would need {needed} more")
        self.needed, self.pinned, self.most = needed, pinned, most


class Pinned(NamedTuple):
    """What a pin came to: the tokens that were cached and are pinned now, and the blocks that hold them."""

    num_tokens: int
    num_blocks: int


class Pin(NamedTuple):
    """One pinned prefix.

    Attributes:
        blocks: in order; the last one may hold tokens behind the prefix as well.
        node, end: the tree's node with the last of them, when the pin was made, and the position behind its first
            token there; see ``tree.holder_before``.
        times: how often it was pinned and not unpinned.
        deadline_s: when it lapses; infinite without an end.
    """

    num_tokens: int
    blocks: list[int]
    node: Node
    end: int
    times: int = 1
    deadline_s: float = float("inf")


class PinLedger:
    """Pins by what they pin; counts blocks, of which pins may share some. Holds no references itself."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pins: dict[PinKey, Pin] = {}  # the one pinned longest ago first
        self._counts: dict[int, int] = {}  # pins on each block
        self._deadlines: list[tuple[float, int, PinKey]] = []
        self._ticket = itertools.count()

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Blocks under at least one pin."""
        return len(self._counts)

    @property
    def oldest(self) -> PinKey | None:
        """What was pinned first of all that is pinned."""
        return next(iter(self._pins), None)

    def count(self, block: int) -> int:
        """Pins on ``block``."""
        return self._counts.get(block, 0)

    def get(self, key: PinKey) -> Pin | None:
        return self._pins.get(key)

    def check_room(self, blocks: list[int], elsewhere: int = 0) -> None:
        """Raises ``PinsFullError`` if pins on ``blocks``, with those on ``elsewhere`` blocks of other caches, would
        pass the cap."""
        fresh, pinned = sum(block not in self._counts for block in blocks), self.num_blocks + elsewhere
        if fresh and pinned + fresh > self.max_blocks:
            raise PinsFullError(fresh, pinned, self.max_blocks)

    def add(self, key: PinKey, pin: Pin) -> None:
        """Enter a pin that was not there."""
        self._pins[key] = pin
        for block in pin.blocks:
            self._counts[block] = self._counts.get(block, 0) + 1
        if pin.deadline_s != float("inf"):
            heapq.heappush(self._deadlines, (pin.deadline_s, next(self._ticket), key))
            if len(self._deadlines) > 2 * len(self._pins) + 64:  # pins renewed or removed leave stale entries
                self._deadlines = [entry for entry in self._deadlines if self._is_current(entry)]
                heapq.heapify(self._deadlines)

    def remove(self, key: PinKey) -> Pin:
        """Take a pin out, however often it was made."""
        pin = self._pins.pop(key)
        for block in pin.blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
        return pin

    def lower(self, key: PinKey) -> None:
        """One unpin of a pin that was made several times."""
        pin = self._pins[key]
        self._pins[key] = pin._replace(times=pin.times - 1)

    def next_lapsed(self, now_s: float) -> PinKey | None:
        """A pin whose time has passed, if there is one; remove it before the next question. Costs O(1) when not."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)
            if self._is_current(entry):
                return entry[2]
        return None

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` if the count of a block is not that of the pins on it."""
        counts: dict[int, int] = {}
        for pin in self._pins.values():
            assert pin.times >= 1
            assert len(set(pin.blocks)) == len(pin.blocks) > 0
            for block in pin.blocks:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self._counts, "pins on blocks miscounted"
        assert len(counts) <= self.max_blocks, "more is pinned than may be"

    def _is_current(self, entry: tuple[float, int, PinKey]) -> bool:
        pin = self._pins.get(entry[2])
        return pin is not None and pin.deadline_s == entry[0]
