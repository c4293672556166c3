"""Ending a JSON output in time: before ``max_tokens`` would cut it into something that does not parse.

Near the limit each sampled token is tried first: if the output could no longer be closed within the tokens that are
left, the next token of the shortest way out is taken instead. How long that way is comes from walking it on a copy of
the parser. The walk closes strings, arrays and objects wherever the grammar lets it, and follows it where it does not;
it knows JSON's shapes only, so other grammars are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

_WATCHED = 192
"""The check begins so many tokens, and twice the shortest output, before the limit."""

_LONGEST = 1024  # tokens: a way out that is longer counts as none
_STRUCTURE = b'"{}[],:\\'
_IN_STRING = b"qZ0- \\"  # allowed together in the middle of a string, and nowhere else


class Closer:
    """The tokens that close JSON in one vocabulary, and the way out of a grammar.

    Args:
        tokens: the bytes of every token id.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        single = {token: index for index, token in reversed(list(enumerate(tokens))) if len(token) == 1}
        self._in_string = [single[bytes([byte])] for byte in _IN_STRING if bytes([byte]) in single]
        self._quotes = [single[b'"']] if b'"' in single else []
        self._closers = [single[byte] for byte in (b"}", b"]", b'"', b"n", b",") if byte in single]

    def changes_nothing(self, mask: bytes, token_id: int) -> bool:
        """Whether the token goes on with a string that can be closed before and behind it."""
        if not (self._is_in_string(mask) and any(mask[token] for token in self._quotes)):
            return False
        return not any(byte in _STRUCTURE or byte >= 0x80 for byte in self._tokens[token_id])  # 0x80: half a character

    def _is_in_string(self, mask: bytes) -> bool:
        return bool(self._in_string) and all(mask[token] for token in self._in_string)

    def next_tokens(self, matcher: LLMatcher) -> list[int]:
        """The next tokens of the way out; empty if there is none."""
        forced: list[int] = matcher.compute_ff_tokens()
        if forced:
            return forced
        mask: bytes = matcher.compute_logit_bias()
        in_string = self._is_in_string(mask)
        for token in self._quotes if in_string else self._closers:
            if mask[token]:
                return [token]
        first = next((place for place in (mask.find(value) for value in {*mask} - {0}) if place >= 0), -1)
        return [first] if first >= 0 else []

    def distance(self, matcher: LLMatcher, limit: int) -> int | None:
        """Tokens until the output matches, by the way out; None if that is more than ``limit``."""
        copy, steps = matcher.deep_copy(), 0
        while not copy.is_accepting():
            tokens = self.next_tokens(copy)
            steps += len(tokens)
            if not tokens or steps > limit or not copy.consume_tokens(tokens):
                return None
        return steps


def _margin(needed: int) -> int:
    """The walk spells in the fewest tokens; behind one that the model spelt otherwise it can take a few more."""
    return 3 + needed // 8 if needed else 0


class ClosingWatch:
    """Watches one completion. ``needed`` is the way out of its present state; None where none is known."""

    def __init__(self, closer: Closer, matcher: LLMatcher) -> None:
        self._closer = closer
        self._needed = closer.distance(matcher, _LONGEST)
        self._begin = _WATCHED + 2 * (self._needed or 0)
        self._tried: tuple[int, int | None] | None = None  # the last token tried, and the way out behind it

    def fork(self) -> ClosingWatch:
        """A copy that goes its own way."""
        other = object.__new__(ClosingWatch)
        other.__dict__.update(self.__dict__)
        return other

    def leaves_room(self, matcher: LLMatcher, mask: bytes, token_id: int, remaining: int) -> bool:
        """Whether the output can still be closed with ``remaining`` tokens once ``token_id``, of ``mask``, is taken."""
        self._tried = None
        if remaining >= self._begin:
            return True
        if self._needed is None:
            self._needed = self._closer.distance(matcher, remaining + 1)
        if self._needed is None or self._needed > remaining + 1:
            return True  # it cannot be closed as it is: nothing to protect
        needed: int | None = self._needed
        if needed == 0 or not self._closer.changes_nothing(mask, token_id):
            copy = matcher.deep_copy()
            needed = self._closer.distance(copy, remaining) if copy.consume_token(token_id) else None
        self._tried = (token_id, needed)
        return needed is not None and needed + _margin(needed) <= remaining

    def next_token(self, matcher: LLMatcher) -> int:
        """The next token of the way out, which there is: ``leaves_room`` has found it."""
        return self._closer.next_tokens(matcher)[0]

    def advance(self, token_id: int) -> None:
        """The completion took this token."""
        self._needed = self._tried[1] if self._tried and self._tried[0] == token_id else None
