"""The prefix tree on small examples that a reader can follow."""

from __future__ import annotations

import pytest

from foreword.kv.tree import Node, PrefixTree


def grow(*sequences: tuple[list[int], list[int]]) -> PrefixTree:
    """A tree with blocks of two tokens; a part-filled last block is a tail."""
    tree = PrefixTree(2)
    for tokens, blocks in sequences:
        whole = len(tokens) // 2
        node, _ = tree.insert(tree.root, tokens, 0, blocks[:whole])
        if len(tokens) % 2:
            tree.insert_tail(node, tokens, whole * 2, blocks[whole])
        tree.check_integrity()
    return tree


def shape(node: Node) -> list[object]:
    return [[child.tokens, child.blocks, *shape(child)] for child in node.children]


def test_branches_split_at_block_borders() -> None:
    """Two sequences share whole blocks only; the rest of each is a child of its own."""
    tree = grow(([1, 2, 3, 4, 5, 6], [10, 11, 12]), ([1, 2, 3, 4, 7, 8], [20, 21, 22]))
    assert shape(tree.root) == [[[1, 2, 3, 4], [10, 11], [[5, 6], [12]], [[7, 8], [22]]]]


def test_insert_reports_the_blocks_that_serve() -> None:
    """Where the tree has the tokens already, its own block stays."""
    tree = grow(([1, 2, 3, 4], [10, 11]))
    node, stored = tree.insert(tree.root, [1, 2, 3, 4, 5, 6], 0, [20, 21, 22])
    assert stored == [10, 11, 22]
    assert (node.tokens, node.end) == ([1, 2, 3, 4, 5, 6], 6)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], (6, [10, 11, 12], None)),
        ([1, 2, 3, 4, 5, 9], (5, [10, 11], 12)),
        ([1, 2, 3, 9], (3, [10], 11)),
        ([1, 9], (1, [], 10)),
        ([1], (1, [], 10)),
        ([9, 9], (0, [], None)),
        ([], (0, [], None)),
        ([1, 2, 3, 4, 7, 8, 9, 9], (7, [10, 11, 22], 23)),
        ([1, 2, 3, 4, 7, 8, 9], (7, [10, 11, 22], 23)),
    ],
)
def test_a_match_is_exact_to_the_token(tokens: list[int], expected: tuple[int, list[int], int | None]) -> None:
    """A match ends at the first token that differs, inside a block too."""
    tree = grow(([1, 2, 3, 4, 5, 6], [10, 11, 12]), ([1, 2, 3, 4, 7, 8, 9], [20, 21, 22, 23]))
    match = tree.match(tokens, len(tokens))
    assert (match.num_tokens, match.blocks, match.tail_block) == expected


def test_a_limit_cuts_the_match() -> None:
    """``limit`` bounds a match, inside a block too."""
    tree = grow(([1, 2, 3, 4, 5, 6], [10, 11, 12]))
    for limit in range(7):
        assert tree.match([1, 2, 3, 4, 5, 6], limit).num_tokens == limit


def test_of_two_branches_the_longer_match_wins() -> None:
    """Among children that share a first token, the one with most tokens in common is found, whatever their order."""
    tree = PrefixTree(4)
    for block, tokens in enumerate(([1, 5, 5, 5], [1, 2, 9, 9], [1, 2, 3, 0], [1, 2, 3, 9], [0, 0, 0, 0])):
        tree.insert(tree.root, list(tokens), 0, [block])
    for tokens, block, length in (
        ([1, 2, 3, 4], {2, 3}, 3), ([1, 2, 8, 8], {1, 2, 3}, 2), ([1, 5, 6, 6], {0}, 2), ([0, 0, 1, 1], {4}, 2),
    ):  # fmt: skip
        match = tree.match(tokens, 4)
        assert match.num_tokens == length
        assert match.tail_block in block


def test_a_gap_is_never_bridged() -> None:
    """When a node's blocks go from its end, nothing behind the gap is matched."""
    tree = grow(([1, 2, 3, 4, 5, 6], [10, 11, 12]))
    (node,) = tree.nodes()
    assert node.drop_last_block(2) == 12
    assert node.drop_last_block(2) == 11
    match = tree.match([1, 2, 3, 4, 5, 6], 6)
    assert (match.num_tokens, match.blocks) == (2, [10])
    assert node.drop_last_block(2) == 10
    assert shape(tree.root) == []


def test_tails_are_leaves_that_whole_blocks_replace() -> None:
    """A part-filled block never gets children, is not stored twice, and is found as superfluous by its longer self."""
    tree = grow(([1, 2, 3], [10, 11]))
    (first,) = tree.root.children
    assert tree.insert_tail(first, [1, 2, 3], 2, 20) is None
    node, stored = tree.insert(first, [1, 2, 3, 4, 5, 6], 2, [30, 31])
    assert stored == [30, 31]
    tail = tree.shorter_tail(node)
    assert tail is not None
    assert (tail.tokens, tail.blocks) == ([3], [11])
    tree.check_integrity()
    assert tree.insert_tail(node, [1, 2, 3, 4, 5], 4, 40) is None, "the tree covers these tokens already"
