"""The prefix tree: which token sequences have their KV in which blocks.

A node is a run of whole blocks; children branch at block borders::

    root ── [You are a | helpful ..] ──┬── [What is | the ..] ── (capital of)      a part-filled last block
                                       └── [Which ci | ty is ..]                   is a leaf of its own

Children are kept sorted by their first block's tokens: among sorted sequences the longest common prefix with any
of them is the one with a neighbour, so a match costs a bisection per node, however many children branch there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from foreword.core.common_prefix import common_prefix_length


class Node:
    """``tokens[i * block_size : (i + 1) * block_size]`` have their KV in ``blocks[i]``."""

    __slots__ = (
        "parent",
        "start",
        "tokens",
        "blocks",
        "children",
        "keys",
        "last_access",
        "hits",
        "branches",
        "age",
        "priority",
    )

    def __init__(self, parent: Node | None, start: int, tokens: list[int], blocks: list[int]) -> None:
        self.parent = parent
        self.start = start  # position of tokens[0] in the sequence
        self.tokens = tokens
        self.blocks = blocks
        self.children: list[Node] = []
        self.keys: list[tuple[int, ...]] = []  # keys[i]: the tokens of children[i]'s first block
        self.last_access = 0
        self.hits = 0
        self.branches = 0  # sequences that went on behind it in another way than those before
        self.age = 0.0
        self.priority = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def drop_last_block(self, block_size: int) -> int:
        """Take the last block off a leaf; an emptied leaf leaves the tree. Returns the block."""
        block = self.blocks.pop()
        if not self.blocks and self.parent is not None:
            index = bisect_left(self.parent.keys, tuple(self.tokens))
            del self.parent.children[index], self.parent.keys[index]
        del self.tokens[len(self.blocks) * block_size :]
        return block


class PrefixMatch(NamedTuple):
    """The longest cached prefix of a token sequence.

    Valid until the tree changes: hand it to ``allocate`` (which takes the references) before anything else.

    Attributes:
        num_tokens: tokens matched.
        blocks: the blocks whose tokens all match, in order.
        tail_block: the block in which the match ends, if it ends inside one.
        node: the node that holds the last of ``blocks`` (the root if there is none).
    """

    num_tokens: int
    blocks: list[int]
    tail_block: int | None
    node: Node

    @property
    def all_blocks(self) -> list[int]:
        """The whole ones and the one that it ends in."""
        return self.blocks if self.tail_block is None else [*self.blocks, self.tail_block]

    def whole_blocks(self, block_size: int) -> PrefixMatch:
        """The match without the block it ends in."""
        return PrefixMatch(len(self.blocks) * block_size, self.blocks, None, self.node)


class PrefixTree:
    """One namespace's tree. It stores what it is told; references and eviction order are the cache manager's."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(None, 0, [], [])

    def match(self, tokens: list[int], limit: int) -> PrefixMatch:
        """Longest prefix of ``tokens[:limit]`` in the tree. Changes nothing."""
        node, position, blocks = self.root, 0, list[int]()
        while True:
            child, common = self.closest_child(node, tokens, position, limit)
            if child is None:
                return PrefixMatch(position, blocks, None, node)
            if common == self.block_size:
                common = common_prefix_length(child.tokens, 0, tokens, position, limit - position)
            whole = common // self.block_size
            blocks += child.blocks[:whole]
            position += common
            if common < len(child.tokens) or common % self.block_size:
                tail = child.blocks[whole] if common % self.block_size else None
                return PrefixMatch(position, blocks, tail, child if whole else node)
            node = child

    def cut(self, node: Node, position: int) -> Node:
        """See to it that a node ends at ``position``, a block border inside ``node`` or its end; returns that node."""
        return self._split(node, position) if node.start < position < node.end else node

    def insert(
        self, node: Node, tokens: list[int], start: int, blocks: list[int], priority: int = 0
    ) -> tuple[Node, list[int]]:
        """Store whole blocks for ``tokens[start : start + len(blocks) * block_size]``.

        ``node`` is what an earlier insert or match returned for the tokens before ``start``.
        Where the tree already has the same tokens, its own block stays and the new one is not taken. What is new gets
        ``priority``.

        Returns:
            The node that now holds the last of them, and the tree's blocks for these tokens.
        """
        size, position, end = self.block_size, start, start + len(blocks) * self.block_size
        node = holder_before(node, start)
        stored: list[int] = []
        while position < end:
            common = common_prefix_length(node.tokens, position - node.start, tokens, position, end - position) // size
            if common:
                first = (position - node.start) // size
                stored += node.blocks[first : first + common]
                position += common * size
                continue
            if position < node.end:
                node = self._split(node, position)
            child, shared = self.closest_child(node, tokens, position, end)
            if child is not None and shared == size:
                node = child
                continue
            fresh = blocks[(position - start) // size :]
            node = self._append(node, tokens[position:end], fresh, priority)
            return node, stored + fresh
        return node, stored

    def insert_tail(self, node: Node, tokens: list[int], start: int, block: int, priority: int = 0) -> Node | None:
        """Store a part-filled block for ``tokens[start:]`` behind ``node``; None if the tree covers those tokens."""
        node = holder_before(node, start)
        if start < node.end:
            if common_prefix_length(node.tokens, start - node.start, tokens, start, len(tokens)) == len(tokens) - start:
                return None
            node = self._split(node, start)
        child, common = self.closest_child(node, tokens, start, len(tokens))
        if child is not None and common == len(tokens) - start:
            return None
        return self._add_child(node, tokens[start:], [block], priority)

    def shorter_tail(self, node: Node) -> Node | None:
        """A part-filled sibling that ``node`` makes superfluous, because its tokens begin ``node``'s."""
        if node.parent is None:
            return None
        keys = node.parent.keys
        index = bisect_left(keys, tuple(node.tokens[: self.block_size]))
        if index and len(keys[index - 1]) < self.block_size and keys[index - 1] == keys[index][: len(keys[index - 1])]:
            return node.parent.children[index - 1]
        return None

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root."""
        pending = list(self.root.children)
        while pending:
            node = pending.pop()
            yield node
            pending += node.children

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` if a node breaks the tree's rules."""
        for node in self.nodes():
            assert node.parent is not None
            assert node.start == node.parent.end, "a node does not start where its parent ends"
            whole = len(node.tokens) == len(node.blocks) * self.block_size
            assert whole or (len(node.blocks) == 1 and not node.children), "a part-filled block inside the tree"
            assert node.blocks, "an empty node"
            assert node.keys == sorted(node.keys), "children out of order"
            assert node.keys == [tuple(child.tokens[: self.block_size]) for child in node.children], "stale keys"

    def closest_child(self, node: Node, tokens: list[int], position: int, limit: int) -> tuple[Node | None, int]:
        """The child that shares most tokens of its first block with ``tokens[position:limit]``, and how many."""
        wanted = tuple(tokens[position : min(position + self.block_size, limit)])
        index = bisect_left(node.keys, wanted)
        best, longest = None, 0
        for i in (index, index - 1):
            if 0 <= i < len(node.keys):
                common = common_prefix_length(node.keys[i], 0, wanted, 0, len(wanted))
                if common > longest:
                    best, longest = node.children[i], common
        return best, longest

    def _append(self, node: Node, tokens: list[int], blocks: list[int], priority: int) -> Node:
        """Lengthen ``node`` if it is a leaf nobody has reused (a reused one keeps its own rank), else add a child."""
        if node.parent is None or node.children or node.hits or node.priority != priority:
            return self._add_child(node, tokens, blocks, priority)
        node.tokens += tokens
        node.blocks += blocks
        return node

    def _add_child(self, node: Node, tokens: list[int], blocks: list[int], priority: int) -> Node:
        child = Node(node, node.end, tokens, blocks)
        child.last_access, child.age, child.priority = node.last_access, node.age, priority
        key = tuple(tokens[: self.block_size])
        index = bisect_left(node.keys, key)
        node.keys.insert(index, key)
        node.children.insert(index, child)
        if len(node.children) > (1 if self.shorter_tail(child) is None else 2):  # a fuller last block is no other way
            node.branches += 1
        return child

    def _split(self, node: Node, position: int) -> Node:
        """Cut ``node`` at a block border; it keeps the part behind. Returns the new node in front."""
        assert node.parent is not None
        tokens, blocks = position - node.start, (position - node.start) // self.block_size
        front = Node(node.parent, node.start, node.tokens[:tokens], node.blocks[:blocks])
        front.last_access, front.hits, front.age, front.priority = node.last_access, node.hits, node.age, node.priority
        index = bisect_left(node.parent.keys, tuple(front.tokens[: self.block_size]))
        node.parent.children[index] = front
        node.parent, node.start = front, position
        node.tokens, node.blocks = node.tokens[tokens:], node.blocks[blocks:]
        front.children, front.keys = [node], [tuple(node.tokens[: self.block_size])]
        return front


def holder_before(node: Node, position: int) -> Node:
    """``node`` or the ancestor that holds the token before ``position``: a split moves a node's front upwards."""
    while node.parent is not None and position <= node.start:
        node = node.parent
    return node
