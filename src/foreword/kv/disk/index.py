"""Which blocks lie in which file: a tree of block keys, in memory.

Bookkeeping only, without locks or input and output. Children of a block are kept sorted by their packed tokens, so
that the one which shares most tokens with a prompt is a neighbour of the place where the prompt would stand.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from foreword.kv.disk.format import TOKEN_BYTES, Header, block_keys, split_blocks


class Segment:
    """A file and what is in it."""

    __slots__ = ("name", "inode", "parent", "first_block", "blocks", "keys", "checksums", "offset", "touched")

    def __init__(self, name: str, inode: int, header: Header, block_size: int, offset: int) -> None:
        self.name = name
        self.inode = inode
        self.parent = header.parent
        self.first_block = header.first_block
        self.blocks = split_blocks(header.tokens, block_size)  # packed tokens
        self.keys = block_keys(header.parent, self.blocks)
        self.checksums = header.checksums
        self.offset = offset  # where the first block begins
        self.touched = -math.inf  # when its file was last marked as used, on the monotonic clock


class Place(NamedTuple):
    """Block ``number`` of a segment."""

    segment: Segment
    number: int

    @property
    def key(self) -> bytes:
        return self.segment.keys[self.number]

    @property
    def tokens(self) -> bytes:
        return self.segment.blocks[self.number]

    @property
    def parent(self) -> bytes:
        return self.segment.keys[self.number - 1] if self.number else self.segment.parent


class BlockIndex:
    """All blocks of one namespace and geometry that are known."""

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}
        self._places: dict[bytes, Place] = {}
        self._children: dict[bytes, list[bytes]] = {}  # key of a block -> tokens of the blocks that follow it, sorted
        self._keys: dict[bytes, list[bytes]] = {}  # the keys of those, in the same order

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, key: bytes) -> Place | None:
        """Where the block with this key is."""
        return self._places.get(key)

    def add(self, segment: Segment) -> Segment | None:
        """Take in a segment. A block that several segments hold is found in the latest.

        Returns:
            A segment of one part-filled block whose tokens begin those of another block, and that is not in the index
            (any more): the one that was added, or one that was there before.
        """
        fuller = self._neighbour(segment, 1)
        if fuller is not None and fuller.tokens.startswith(segment.blocks[0]):
            return segment
        shorter = self._neighbour(segment, -1)
        superseded = shorter is not None and segment.blocks[0].startswith(shorter.tokens)
        if shorter is not None and superseded:
            self.remove(shorter.segment)
        self.segments[segment.name] = segment
        for number, key in enumerate(segment.keys):
            if key not in self._places:
                self._add_child(Place(segment, number))
            self._places[key] = Place(segment, number)
        return shorter.segment if shorter is not None and superseded else None

    def remove(self, segment: Segment) -> None:
        """Forget a segment; what follows its blocks stays, and is found again once they are."""
        self.segments.pop(segment.name, None)
        for number, key in enumerate(segment.keys):
            place = self._places.get(key)
            if place is not None and place.segment is segment:
                del self._places[key]
                self._drop_child(Place(segment, number))

    def child(self, parent: bytes, tokens: bytes) -> tuple[Place | None, int]:
        """The block behind ``parent`` that shares most tokens with ``tokens`` from the start, and how many."""
        siblings = self._children.get(parent)
        if not siblings:
            return None, 0
        index = bisect_left(siblings, tokens)
        best, longest = None, 0
        for i in (index, index - 1):
            if 0 <= i < len(siblings):
                common = common_tokens(siblings[i], tokens)
                if common > longest:
                    best, longest = self._places[self._keys[parent][i]], common
        return best, longest

    def behind(self, parent: bytes, tokens: bytes, size: int) -> bytes:
        """Up to ``size`` bytes of packed tokens that follow ``tokens``, less than a block, behind ``parent``."""
        siblings = self._children.get(parent, [])
        index = bisect_left(siblings, tokens)
        if index == len(siblings) or not siblings[index].startswith(tokens):
            return b""
        found, key = siblings[index][len(tokens) :], self._keys[parent][index]
        while len(found) < size and (following := self._keys.get(key)):
            key = following[0]
            found += self._places[key].tokens
        return found[:size]

    def path(self, segment: Segment) -> list[Segment]:
        """The segment and those before it, as far as they are known, the first one last."""
        path = [segment]
        while (place := self._places.get(path[-1].parent)) is not None:
            path.append(place.segment)
        return path

    def _neighbour(self, segment: Segment, side: int) -> Place | None:
        """The sibling before (-1) or behind (1) a segment's first block. No sibling's tokens begin another's."""
        siblings = self._children.get(segment.parent, [])
        index = bisect_left(siblings, segment.blocks[0])
        if index < len(siblings) and siblings[index] == segment.blocks[0]:
            index += side == 1
        index += min(side, 0)
        return self._places[self._keys[segment.parent][index]] if 0 <= index < len(siblings) else None

    def _add_child(self, place: Place) -> None:
        siblings = self._children.setdefault(place.parent, [])
        index = bisect_left(siblings, place.tokens)
        siblings.insert(index, place.tokens)
        self._keys.setdefault(place.parent, []).insert(index, place.key)

    def _drop_child(self, place: Place) -> None:
        siblings = self._children[place.parent]
        index = bisect_left(siblings, place.tokens)
        del siblings[index], self._keys[place.parent][index]
        if not siblings:
            del self._children[place.parent], self._keys[place.parent]


def common_tokens(a: bytes, b: bytes) -> int:
    """How many packed tokens agree from the start."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    return next(i for i in range(size) if a[i] != b[i]) // TOKEN_BYTES
