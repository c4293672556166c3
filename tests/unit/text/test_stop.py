"""Stop strings, checked against a reference that sees the whole text at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.text.stop import StopStrings

ALPHABET = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Try every end position in order; among the stop strings that end there take the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def streamed(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    watch = StopStrings(stops, include)
    emitted = ""
    for piece in pieces:
        text, matched = watch.append(piece)
        emitted += text
        if matched is not None:
            return emitted, matched
    return emitted + watch.flush(), None


@given(st.lists(ALPHABET, max_size=6), STOPS, st.booleans())
def test_trap_23_any_split_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    assert streamed(pieces, stops, include) == reference("".join(pieces), stops, include)


@given(ALPHABET, STOPS)
def test_trap_23_nothing_leaks_and_nothing_is_held_without_need(text: str, stops: list[str]) -> None:
    """After every character: emitted is the text less the longest end that could still become a stop string."""
    watch = StopStrings(stops)
    emitted = ""
    for position, char in enumerate(text, 1):
        new, matched = watch.append(char)
        emitted += new
        if matched is not None:
            break
        seen = text[:position]
        keep = next(k for k in range(len(seen), -1, -1) if k == 0 or any(s.startswith(seen[-k:]) for s in stops))
        assert emitted == seen[: len(seen) - keep]


def test_trap_23_the_first_completed_wins_over_the_first_begun() -> None:
    assert streamed(["a long stop", " and END"], ["long stop and END", "stop"], False) == ("a long ", "stop")


def test_of_those_completed_together_the_longest_wins() -> None:
    assert streamed(["x", "ab", "c"], ["c", "abc", "bc"], False) == ("x", "abc")


def test_nothing_is_emitted_after_a_match() -> None:
    watch = StopStrings(["."])
    assert watch.append("one. two") == ("one", ".")
    assert watch.append("three") == ("", ".")
    assert watch.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings([]).append("anything") == ("anything", None)


@pytest.mark.parametrize("stop", ["", 3])
def test_a_stop_that_is_no_text_is_refused(stop: object) -> None:
    with pytest.raises(ValueError, match=r"stop=.*non-empty"):
        StopStrings([stop])  # type: ignore[list-item]
