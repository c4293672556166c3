"""Where two texts run along together again behind a difference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from foreword.text.pieces import common_prefix

UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff"  # Thai, Japanese, Chinese: no spaces between words
_LETTER = re.compile(rf"[^\W{UNSPACED}]")
_WORD = re.compile(rf"<\|?\w+\|?>|{_LETTER.pattern}+|\S")
_RUN = 4  # words in a row that are no coincidence
_UNBROKEN = 40  # characters of a word
_SOUGHT = 24  # words in which two texts must come together again
_Word = tuple[int, int, str]


def words_of(text: str, start: int = 0, end: int | None = None) -> list[_Word]:
    """Start, end and text of each word and each sign; a sign of a script without spaces is a word, and so is
    a template's marker."""
    found = _WORD.finditer(text, start, len(text) if end is None else end)
    return [(*match.span(), match[0]) for match in found]


def shared(expected: str, actual: str) -> int:
    """How many characters of ``actual`` the other text has too, in whatever order.

    The end that both have counts first, then equal lines, each as often as both have it; of the others, runs of four
    words that both have. Linear.
    """
    same = common_suffix(expected, actual)
    first, second = expected[: len(expected) - same], actual[: len(actual) - same]
    available = Counter(first.split("\n"))
    total, rest = same, []
    for line in second.split("\n"):
        if available[line] > 0:
            available[line] -= 1
            total += len(line) + 1
        else:
            rest.append(line)
    left = [line for line, count in available.items() if count > 0]
    return min(total + _in_runs(_split("\n".join(left)), _split("\n".join(rest))), len(actual))


def similarity(expected: str, actual: str) -> float:
    """The part of the longer text that the other one has too, in [0, 1]; 1 for two empty ones."""
    longest = max(len(expected), len(actual))
    return shared(expected, actual) / longest if longest else 1.0


def common_suffix(first: str, second: str) -> int:
    """How many characters both end with."""
    return common_prefix(first[::-1], second[::-1])


def _split(text: str) -> list[str]:
    """The text at its white space, and what has none at its words and signs."""
    words: list[str] = []
    for word in text.split():
        words += [word] if len(word) <= _UNBROKEN else _WORD.findall(word)
    return words


def _in_runs(expected: list[str], actual: list[str]) -> int:
    """The characters of ``actual`` in runs of words that ``expected`` has, with a space between two words."""
    known = set(_grams(expected))
    total, end = 0, 0  # of the run that was counted last
    for at, gram in enumerate(_grams(actual) if known else ()):
        if gram in known:
            start = max(at, end)
            total += sum(map(len, actual[start : at + _RUN])) + at + _RUN - start - (start > end or not end)
            end = at + _RUN
    return total


def _grams(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(words[at:] for at in range(_RUN)), strict=False)


def slot(expected: str, actual: str, at: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The words around ``at`` that differ, up to where both go on with the same words, or both end.

    Returns the two spans, from the start of the first word that differs; None if the texts stay apart.
    """
    begin = at
    if any(_LETTER.match(text, at) for text in (expected, actual)):  # it may lie inside a word
        while begin and _LETTER.match(expected, begin - 1):
            begin -= 1
    window = 40 * _SOUGHT
    first = words_of(expected, begin, begin + window)[:_SOUGHT]
    second = words_of(actual, begin, begin + window)[:_SOUGHT]
    ends = (len(first) < _SOUGHT, len(second) < _SOUGHT)
    for total in range(2 * _SOUGHT):
        for here in range(max(total - _SOUGHT, 0), min(total, _SOUGHT) + 1):
            there = total - here
            if there > len(first) or here > len(second):
                continue
            tail = (
                [word for *_, word in first[there : there + _RUN]],
                [word for *_, word in second[here : here + _RUN]],
            )
            whole = len(tail[0]) == _RUN or (all(ends) and there + len(tail[0]) == len(first))
            if tail[0] == tail[1] and whole:
                return (begin, _end(first, there, begin)), (begin, _end(second, here, begin))
    return None


def _end(words: list[_Word], count: int, begin: int) -> int:
    return words[count - 1][1] if count else begin
