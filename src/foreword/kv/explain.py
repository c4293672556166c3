"""Why a match with the cache stopped where it did."""

from __future__ import annotations

from typing import NamedTuple

from foreword.kv.prompt_log import Neighbour
from foreword.kv.tree import Node, PrefixTree


class Stop(NamedTuple):
    """Where the longest cached prefix of a token sequence ends.

    Attributes:
        num_tokens: tokens matched.
        instead: what the cache holds from there on, the nearest of several; empty if it ends there too.
    """

    num_tokens: int
    instead: list[int]


class Evidence(NamedTuple):
    """What was known of a prompt when it was looked up; why it matched no further can be told from it at any time.

    Attributes:
        stop: where the match ended.
        near: prompts of the same namespace that ran lately and begin alike.
        elsewhere: the prompt of another namespace that begins most alike.
    """

    stop: Stop
    near: list[Neighbour]
    elsewhere: Neighbour | None


def find_stop(tree: PrefixTree, tokens: list[int], count: int) -> Stop:
    """The end of the match of ``tokens``, and up to ``count`` tokens that are cached behind it. Changes nothing."""
    match = tree.match(tokens, len(tokens))
    position, node = match.num_tokens, match.node
    if node.end <= position:  # at its end, or inside the first block of a child
        child = tree.closest_child(node, tokens, node.end, len(tokens))[0] or _latest(node)
        if child is None:
            return Stop(position, [])
        node = child
    instead = node.tokens[position - node.start :][:count]
    while len(instead) < count and (child := _latest(node)) is not None:
        node = child
        instead = instead + node.tokens[: count - len(instead)]
    return Stop(position, instead)


def _latest(node: Node) -> Node | None:
    return max(node.children, key=lambda child: child.last_access, default=None)
