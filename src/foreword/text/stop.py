"""Stop strings in streamed text, wherever the borders of the pieces fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foreword.core.validation import reject


class StopResult(NamedTuple):
    """What one more piece of text led to.

    Attributes:
        text: new text that is safe to emit; may be empty.
        matched: the stop string that was completed; None while there is none.
    """

    text: str
    matched: str | None


class StopStrings:
    """Watches a stream of text for stop strings and holds back only what could still become one.

    The string that is *completed* first wins, that is the one with the smallest end position in the whole text; of
    those that end at the same place, the longest. The result is the same however the text is cut into pieces.

    Args:
        stops: the strings to look for; none is fine.
        include: emit the matched stop string as well, instead of cutting the text before it.

    Raises:
        ValueError: a stop string is empty or no string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                reject("stop", stop, "give non-empty strings")
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def append(self, text: str) -> StopResult:
        """Take the next piece of text. After a match nothing more is emitted."""
        if not self._stops:
            return StopResult(text, None)
        if self._matched is not None:
            return StopResult("", self._matched)
        # Whatever was emitted before can be no part of a match, so the held text and the new text are all to look at.
        window = self._held + text
        self._held = ""
        found = self._first_completed(window)
        if found is not None:
            start, self._matched = found
            end = start + len(self._matched) if self._include else start
            return StopResult(window[:end], self._matched)
        keep = self._unfinished(window)
        self._held = window[len(window) - keep :]
        return StopResult(window[: len(window) - keep], None)

    def flush(self) -> str:
        """The text held back; for when generation ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, window: str) -> tuple[int, str] | None:
        """Start and text of the stop string that ends first; the longest of those that end together."""
        hits = [(window.find(stop), stop) for stop in self._stops]
        hits = [hit for hit in hits if hit[0] >= 0]
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), -len(hit[1])), default=None)

    def _unfinished(self, window: str) -> int:
        """Length of the longest end of ``window`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
