"""Where two texts run along together again behind a difference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff"  # Thai, Japanese, Chinese: no spaces between words
_LETTER = re.compile(rf"[^\W{UNSPACED}]")
_WORD = re.compile(rf"<\|?\w+\|?>|{_LETTER.pattern}+|\S")
_RUN = 4  # words in a row that are no coincidence
_SOUGHT = 24  # words in which two texts must come together again
_Word = tuple[int, int, str]


def words_of(text: str, start: int = 0, end: int | None = None) -> list[_Word]:
    """Start, end and text of each word and each sign; a sign of a script without spaces is a word, and so is
    a template's marker."""
    found = _WORD.finditer(text, start, len(text) if end is None else end)
    return [(*match.span(), match[0]) for match in found]


def shared(expected: str, actual: str) -> int:
    """How many characters of ``actual`` the other text has too, in whatever order.

    Equal lines count, each as often as both have it; of the others, runs of four words that both have. Linear.
    """
    available = Counter(expected.splitlines(keepends=True))
    total, rest = 0, []
    for line in actual.splitlines(keepends=True):
        if available[line] > 0:
            available[line] -= 1
            total += len(line)
        else:
            rest.append(line)
    left = "".join(line * count for line, count in available.items())
    return total + sum(end - start for start, end in _runs(left, "".join(rest)))


def similarity(expected: str, actual: str) -> float:
    """The part of the longer text that the other one has too, in [0, 1]; 1 for texts too short to tell."""
    longest = max(len(expected), len(actual))
    return shared(expected, actual) / longest if longest else 1.0


def _runs(expected: str, actual: str) -> Iterator[tuple[int, int]]:
    """The stretches of ``actual`` that consist of runs of words found in ``expected``."""
    known_words = [word for _, _, word in words_of(expected)]
    known = {tuple(known_words[at : at + _RUN]) for at in range(len(known_words) - _RUN + 1)}
    words = words_of(actual) if known else []
    start = end = -1
    for at in range(len(words) - _RUN + 1):
        if tuple(word for _, _, word in words[at : at + _RUN]) not in known:
            continue
        if words[at][0] > end:
            if end > start:
                yield start, end
            start = words[at][0]
        end = words[at + _RUN - 1][1]
    if end > start:
        yield start, end


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
