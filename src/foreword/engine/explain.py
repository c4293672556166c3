"""From what the cache knew of a prompt to an explanation that names the place and the cause.

The engine thread only gathers evidence, in microseconds; texts are compared when somebody looks at the explanation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from foreword.core.common_prefix import common_prefix_length
from foreword.core.explanation import CacheExplanation, PromptPiece, Reason
from foreword.kv.explain import Evidence
from foreword.kv.prompt_log import Neighbour
from foreword.text.beginnings import token_ends
from foreword.text.causes import compare
from foreword.text.conversation import Rendered
from foreword.text.pieces import PromptText, locate, plain
from foreword.text.tokenizer import Tokenizer

_SHOWN = 120  # characters of each text
_CLOSE = 16
"""Tokens by which a prompt may part earlier and still be the nearest: the digits of a clock agree by chance."""


class LazyExplanation:
    """An explanation that is worked out when it is first asked for, from what was known at admission.

    Args:
        token_ids: of the prompt.
        source: what it was rendered from; None for a plain prompt.
        reused_tokens: tokens that were taken from the cache.
        prefill_speed: tokens per second measured so far; None before any were.
    """

    def __init__(
        self,
        token_ids: list[int],
        source: object,
        evidence: Evidence,
        tokenizer: Tokenizer,
        *,
        reused_tokens: int,
        prefill_speed: float | None,
    ) -> None:
        self.num_tokens = len(token_ids)
        self.reused_tokens = reused_tokens
        self.weight = max(len(token_ids), 256) + len(evidence.stop.instead)  # in memory, counted in tokens
        self._known = (token_ids, source, evidence, tokenizer, prefill_speed)

    @cached_property
    def value(self) -> CacheExplanation:
        token_ids, source, evidence, tokenizer, speed = self._known
        return explain(token_ids, source, evidence, tokenizer, speed)

    @property
    def brief(self) -> CacheExplanation:
        """Reason and position alone."""
        evidence = self._known[2]
        matched, total = evidence.stop.num_tokens, self.num_tokens
        if matched == total:
            return CacheExplanation(total, total, "complete")
        reason, nearest = _reason(total, evidence)
        return CacheExplanation(total, matched, reason, matched, nearest=nearest.prompt.request_id if nearest else None)

    def pieces(self) -> Iterator[tuple[PromptPiece, str, int]]:
        """The prompt's pieces, their texts, and the token index at which each ends."""
        token_ids, source, _, tokenizer, _ = self._known
        prompt = prompt_text(token_ids, source, tokenizer)
        ends, position = token_ends(token_ids, tokenizer), 0
        for piece, begin, end in prompt.pieces:
            while position < len(ends) and ends[position] <= end:
                position += 1
            yield piece, prompt.text[begin:end], position

    def __reduce__(self) -> Any:
        return _Known, (self.value, self.brief)


class _Known(NamedTuple):
    """A :class:`LazyExplanation` that has been to another process."""

    value: CacheExplanation
    brief: CacheExplanation


def explain(
    token_ids: list[int], source: object, evidence: Evidence, tokenizer: Tokenizer, prefill_speed: float | None
) -> CacheExplanation:
    """Why no more of a prompt was cached."""
    total, matched = len(token_ids), evidence.stop.num_tokens
    if matched == total:
        return CacheExplanation(total, total, "complete")
    actual = prompt_text(token_ids, source, tokenizer)
    offset = _offset(actual.text, token_ids, matched, tokenizer)
    reason, nearest = _reason(total, evidence)
    found = CacheExplanation(
        prompt_tokens=total,
        matched_tokens=matched,
        reason=reason,
        position=matched,
        piece=actual.owner(offset),
        actual_text=actual.text[offset:][:_SHOWN],
        before_text=actual.text[:offset][-_SHOWN:],
        nearest=nearest.prompt.request_id if nearest else None,
    )
    if reason == "diverged":
        found = _diverged(found, actual, offset, token_ids, evidence, tokenizer)
    elif nearest is not None:
        text = tokenizer.decode(token_ids[matched : nearest.num_common], skip_special_tokens=False)
        found = dataclasses.replace(
            found,
            # what another tenant wrote is not shown, though it is what this one wrote
            expected_text=text[:_SHOWN] if reason == "evicted" else "",
            cause="namespace" if reason == "other_namespace" else None,
            lost_tokens=min(nearest.num_common, total - 1) - matched,
        )
    speed = prefill_speed or None
    return dataclasses.replace(found, lost_seconds=None if speed is None else found.lost_tokens / speed)


def _reason(total: int, evidence: Evidence) -> tuple[Reason, Neighbour | None]:
    """Why the match ended, and the logged prompt that shows it."""
    matched = evidence.stop.num_tokens
    gone = max(evidence.near, key=lambda each: min(each.num_common, each.num_computed), default=None)
    if gone is not None and min(gone.num_common, gone.num_computed) > matched:
        return "evicted", gone._replace(num_common=min(gone.num_common, gone.num_computed))
    other = evidence.elsewhere
    if other is not None and (other.num_common > matched + _CLOSE or other.num_common == total):
        return "other_namespace", other
    if evidence.stop.instead or any(len(each.key) // 4 > each.num_common >= matched for each in evidence.near):
        return "diverged", None
    return "never_seen", None


def _diverged(
    found: CacheExplanation,
    actual: PromptText,
    offset: int,
    token_ids: list[int],
    evidence: Evidence,
    tokenizer: Tokenizer,
) -> CacheExplanation:
    """The explanation with what the nearest prompt has instead, and why."""
    matched = evidence.stop.num_tokens
    candidates = [each for each in evidence.near if matched >= each.num_common >= matched - _CLOSE]
    nearest = _most_alike(candidates, actual.text[actual.text.rfind("\n", 0, offset) + 1 :], tokenizer)
    if nearest is None:
        expected_ids = token_ids[:matched] + evidence.stop.instead
        expected = plain(tokenizer.decode(expected_ids, skip_special_tokens=False))
    else:
        expected_ids, expected = nearest.token_ids, _logged_text(nearest, tokenizer)
    at = min(nearest.num_common, matched) if nearest else matched
    begin = offset if at == matched else _offset(actual.text, token_ids, at, tokenizer)
    same = begin + common_prefix_length(expected.text, begin, actual.text, begin, len(actual.text))
    retokenized = _is_retokenized(expected_ids, token_ids, at, same - begin, tokenizer)
    difference = compare(expected, actual, begin if retokenized else same, retokenized=retokenized)
    behind = len(actual.text) - difference.offset
    share = difference.lost_characters / behind if behind else 0.0
    return dataclasses.replace(
        found,
        piece=difference.piece if difference.cause or retokenized else found.piece,
        expected_text=expected.text[begin:][:_SHOWN],
        actual_text=actual.text[begin:][:_SHOWN],
        before_text=actual.text[:begin][-_SHOWN:],
        cause=difference.cause,
        lost_tokens=round(share * (len(token_ids) - at)),
        reusable_share=difference.reusable_share,
        nearest=nearest.prompt.request_id if nearest else None,
    )


def _is_retokenized(expected: list[int], actual: list[int], at: int, num_same: int, tokenizer: Tokenizer) -> bool:
    """Whether the first tokens that differ spell the same text."""
    if at >= min(len(expected), len(actual)):
        return False
    spelled = [tokenizer.decode([ids[at]], skip_special_tokens=False) for ids in (expected, actual)]
    return expected[at] != actual[at] and num_same >= max(map(len, spelled)) > 0


def prompt_text(token_ids: list[int], source: object, tokenizer: Tokenizer) -> PromptText:
    """A prompt as text in pieces."""
    if isinstance(source, Rendered):
        return locate(source, source.given)
    return plain(tokenizer.decode(token_ids, skip_special_tokens=False))


def _most_alike(candidates: list[Neighbour], tail: str, tokenizer: Tokenizer) -> Neighbour | None:
    """The candidate whose text has most in common with the ``tail`` of the prompt; of several the longest match."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    lines = set(tail.splitlines())

    def likeness(each: Neighbour) -> tuple[int, int]:
        """Characters in lines that both have. Only texts are compared: to find the pieces of each takes too long."""
        ids, source, text = each.token_ids, each.prompt.source, ""
        if isinstance(source, Rendered):
            ids, text = ids[each.prompt.num_prompt :], source.text
        text += tokenizer.decode(ids, skip_special_tokens=False)
        return sum(map(len, lines & set(text.splitlines()))), each.num_common

    return max(candidates, key=likeness)


def _logged_text(logged: Neighbour, tokenizer: Tokenizer) -> PromptText:
    """A logged prompt, with what was generated behind it."""
    ids, num_prompt = logged.token_ids, logged.prompt.num_prompt
    text = prompt_text(ids[:num_prompt], logged.prompt.source, tokenizer)
    return text.with_answer(tokenizer.decode(ids[num_prompt:], skip_special_tokens=False))


def _offset(text: str, token_ids: list[int], count: int, tokenizer: Tokenizer) -> int:
    """Where in ``text`` the first ``count`` tokens end; the last of them may end inside a character.

    Told from what is behind them if that is less, and spells how the text ends.
    """
    if count > len(token_ids) // 2:
        behind = b"".join(tokenizer.token_bytes(token, skip_special_tokens=False) for token in token_ids[count:])
        rest = behind.decode(errors="replace")
        if text.endswith(rest):
            return len(text) - len(rest)
    spelled = tokenizer.decode(token_ids[:count], skip_special_tokens=False)
    return common_prefix_length(spelled, 0, text, 0, len(text))
