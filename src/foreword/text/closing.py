"""Ending a JSON output in time: before ``max_tokens`` would cut it into something that does not parse.

Near the limit each sampled token is tried first: if the output could no longer be closed within the tokens that are
left, the next token of a short way out is taken instead. How long that way is comes from walking it on a copy of the
parser. The walk closes strings, arrays and objects wherever the grammar lets it, and follows the grammar where it does
not; it knows JSON's shapes only, so other grammars are left alone.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

_WATCHED = 192
"""The check begins so many tokens, and twice the shortest output, before the limit."""

_LONGEST = 1024  # tokens: a way out that is longer counts as none
_STRUCTURE = b'"{}[],:\\'
_INSIDE = b"qQxXzZjJ"  # of these, three may come next inside a string, and hardly ever outside
_ANYTHING = b"qZ0- \\"  # allowed together where a string may go on with anything
_CLOSERS = (b"}", b"]", b'"', b"null", b",")  # outside of strings, in the order of preference
_STEPS = b"01-.:/@ aATZYMWDHS\x80"  # bytes that lead on in numbers, patterns and formats
_LEXEME = 64  # bytes of one pattern that are walked at once
_TRIED = 96  # tokens to which each branch of a choice is followed
_BRANCHES = 16  # branches of a choice that are compared
_FEW = 40  # bytes: where no more may come next, each of them is tried

Ways = dict[int, list[int]]
"""By the hash of a mask, the tokens that lead on. Filled when a grammar is compiled, and by each completion for itself
as it meets other states: what one completion is given does not depend on what others met."""


class Closer:
    """The tokens that close JSON in one vocabulary, and the way out of a grammar.

    Args:
        tokens: the bytes of every token id.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        ids = {
            token: index for index, token in reversed(list(enumerate(tokens))) if len(token) == 1 or token == b"null"
        }
        self._quote = ids.get(b'"', -1)
        self._inside = [ids[bytes([byte])] for byte in _INSIDE if bytes([byte]) in ids]
        self._anything = [ids[bytes([byte])] for byte in _ANYTHING if bytes([byte]) in ids]
        self._closers = [ids[token] for token in _CLOSERS if token in ids]
        self._steps = [ids[bytes([byte])] for byte in _STEPS if bytes([byte]) in ids]
        self._digit = ids.get(b"0", -1)
        self._single = sorted(index for token, index in ids.items() if len(token) == 1)

    def changes_nothing(self, matcher: LLMatcher, token_id: int) -> bool:
        """Whether the token goes on with a string that can be closed before and behind it."""
        if self._quote < 0 or not all(_allows(matcher, token) for token in (self._quote, *self._anything)):
            return False
        return not any(byte in _STRUCTURE or byte >= 0x80 for byte in self._tokens[token_id])  # 0x80: half a character

    def distance(self, matcher: LLMatcher, ways: Ways, limit: int, *, choose: bool = True) -> int | None:
        """Tokens until the output matches, by the way out; None if that is more than ``limit``.

        With ``choose`` the branches of a choice are compared, else the first one is taken.
        """
        state, steps = matcher.deep_copy(), 0
        while not state.is_accepting():
            tokens = self.next_tokens(state, ways, choose=choose)
            steps += len(tokens)
            if not tokens or steps > limit:
                return None
            state.consume_tokens(tokens)
        return steps

    def next_tokens(self, matcher: LLMatcher, ways: Ways, *, choose: bool = True) -> list[int]:
        """The next tokens of the way out; empty if there is none."""
        forced: list[int] = matcher.compute_ff_tokens()
        if forced:
            return forced
        is_inside = self._is_inside(matcher)
        closer = self._closer(matcher, is_inside)
        if closer >= 0:
            return [closer]
        mask: bytes = matcher.compute_bitmask()
        key = hash(mask)
        known = ways.get(key)
        if known is not None and matcher.validate_tokens(known) == len(known):
            return known
        if is_inside or (self._digit >= 0 and _bit(mask, self._digit)):
            found = ways[key] = self._finish_lexeme(matcher, mask)
            return found
        branches = [token for token in self._single if _bit(mask, token)]
        if not choose or len(branches) < 2:
            return branches[:1] or first_allowed(mask)
        found = ways[key] = self._shortest(matcher, ways, branches)
        return found

    def _is_inside(self, matcher: LLMatcher) -> bool:
        """Whether a string is open."""
        return sum(_allows(matcher, token) for token in self._inside) > 2

    def _closer(self, matcher: LLMatcher, is_inside: bool) -> int:
        """The token that closes most; -1 if none may come next."""
        closers = [self._quote] if is_inside else self._closers
        return next((token for token in closers if token >= 0 and _allows(matcher, token)), -1)

    def _finish_lexeme(self, matcher: LLMatcher, mask: bytes) -> list[int]:
        """To where a number, a pattern or a format can end: a step into a state that is new, else any step."""
        state, path, seen = matcher.deep_copy(), list[int](), {hash(mask)}
        while len(path) < _LEXEME:
            single = [token for token in self._single if _bit(mask, token)]
            steps = single if 0 < len(single) <= _FEW else [token for token in self._steps if _bit(mask, token)]
            steps = steps or first_allowed(mask)
            options = [(token, *_after(state, token)) for token in steps]
            if not options:
                break
            token, state, mask = next((each for each in options if hash(each[2]) not in seen), options[0])
            path.append(token)
            seen.add(hash(mask))
            if state.is_accepting() or self._closer(state, self._is_inside(state)) >= 0 or state.compute_ff_tokens():
                break
        return path

    def _shortest(self, matcher: LLMatcher, ways: Ways, branches: list[int]) -> list[int]:
        """The branch with the shortest way out; keys that are optional and schemas within themselves are the longer."""
        best, limit = branches[0], _TRIED
        for token in branches[:_BRANCHES]:
            state, _ = _after(matcher, token)
            length = self.distance(state, ways, limit, choose=False)
            if length is not None and length < limit:
                best, limit = token, length
        return [best]


def _after(matcher: LLMatcher, token: int) -> tuple[LLMatcher, bytes]:
    state = matcher.deep_copy()
    state.consume_token(token)
    return state, state.compute_bitmask()


def _allows(matcher: LLMatcher, token: int) -> bool:
    return matcher.validate_tokens([token]) == 1  # a tenth of a whole mask


def _bit(mask: bytes, token: int) -> int:
    return mask[token >> 3] >> (token & 7) & 1


def first_allowed(mask: bytes) -> list[int]:
    """The lowest token id that a mask allows; empty if it allows none."""
    rest = mask.lstrip(b"\0")
    return [8 * (len(mask) - len(rest)) + (rest[0] & -rest[0]).bit_length() - 1] if rest else []


def _margin(needed: int) -> int:
    """The walk spells in the fewest tokens; behind one that the model spelt otherwise it can take a few more."""
    return 3 + needed // 8 if needed else 0


class ClosingWatch:
    """Watches one completion. ``needed`` is the way out of its present state; None where none is known."""

    def __init__(self, closer: Closer, matcher: LLMatcher) -> None:
        self._closer = closer
        self._ways = Ways()
        self._needed = closer.distance(matcher, self._ways, _LONGEST)
        self._begin = _WATCHED + 2 * (self._needed or 0)
        self._tried: tuple[int, int | None] | None = None  # the last token tried, and the way out behind it
        self._plan: list[int] = []  # tokens of the way out that have been begun and lead on together

    def fork(self) -> ClosingWatch:
        """A copy that goes its own way."""
        other = copy.copy(self)
        other._ways = dict(self._ways)
        return other

    def leaves_room(self, matcher: LLMatcher, token_id: int, remaining: int) -> bool:
        """Whether the output can still be closed with ``remaining`` tokens once ``token_id`` is taken."""
        self._tried = None
        if remaining >= self._begin:
            return True
        if self._needed is None:
            self._needed = self._closer.distance(matcher, self._ways, remaining + 1)
        if self._needed is None or self._needed > remaining + 1:
            return True  # it cannot be closed as it is: nothing to protect
        needed: int | None = self._needed
        if needed == 0 or not self._closer.changes_nothing(matcher, token_id):
            state = matcher.deep_copy()
            state.consume_token(token_id)
            needed = self._closer.distance(state, self._ways, remaining)
        self._tried = (token_id, needed)
        return needed is not None and needed + _margin(needed) <= remaining

    def next_token(self, matcher: LLMatcher) -> int:
        """The next token of the way out, which there is: ``leaves_room`` has found it."""
        self._plan = self._plan or self._closer.next_tokens(matcher, self._ways)
        return self._plan[0]

    def advance(self, token_id: int) -> None:
        """The completion took this token."""
        if self._plan and self._plan[0] == token_id:
            self._plan = self._plan[1:]
            self._needed = self._needed - 1 if self._plan and self._needed else None
            return
        self._plan = []
        self._needed = self._tried[1] if self._tried and self._tried[0] == token_id else None
