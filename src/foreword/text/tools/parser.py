"""Taking an answer apart into content and tool calls while it streams."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable

from foreword.core.message import MessageDelta, ToolCallDelta
from foreword.text.tools.scan import CallScanner, Scan

_ALPHABET = string.ascii_letters + string.digits


def new_call_id() -> str:
    """A fresh id for a call: 9 letters and digits, which is all that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class ToolParser(ABC):
    """Separates content from calls. What it returns in sum does not depend on how the text was cut.

    Text that may turn out to be markup is held back until that is decided, so is white space, which belongs to the
    markup when a call follows. A call that makes no sense comes back as content; nothing raises.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._mark = 0  # where the markup of the call begins that is being read
        self._index = -1
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._space = ""  # white space that is content only if more content follows
        self._has_content = False
        self._after_call = False

    def append(self, text: str) -> MessageDelta:
        """What ``text`` adds to the message."""
        self._buffer += text
        while self._advance(False):
            pass
        return self._take()

    def finish(self) -> MessageDelta:
        """What is still held back at the end of the text."""
        while self._advance(True):
            pass
        if self._index < 0 and self._space:
            self._content.append(self._space)
            self._space = ""
        return self._take()

    @abstractmethod
    def _advance(self, final: bool) -> bool:
        """Read on from ``_at``; False when nothing more can be decided before there is more text."""

    @abstractmethod
    def _keep_from(self) -> int:
        """Where in the buffer the text begins that may have to be read again."""

    def _take(self) -> MessageDelta:
        done = self._keep_from()
        self._buffer = self._buffer[done:]
        self._at -= done
        self._mark -= done
        delta = MessageDelta(content="".join(self._content), tool_calls=_joined(self._calls))
        self._content, self._calls = [], []
        return delta

    def _emit_text(self, text: str) -> None:
        whole = self._space + text
        body = whole.rstrip()
        self._space = whole[len(body) :]
        if not body:
            return
        if self._after_call:
            rest = body.lstrip()
            if not self._has_content:
                body = rest
            elif body is rest or body == rest:
                body = "\n" + rest  # the call stood between two words
            self._after_call = False
        self._has_content = True
        self._content.append(body)

    def _emit_call(self, name: str, call_id: str | None) -> None:
        self._index += 1
        self._space = ""
        self._after_call = True
        self._calls.append(ToolCallDelta(self._index, call_id or new_call_id(), name))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._calls.append(ToolCallDelta(self._index, arguments=text))


class MarkedParser(ToolParser):
    """Calls that begin with a marker, ``opener``, and end with ``closer`` if there is one; between them an object."""

    def __init__(self, opener: str, closer: str = "") -> None:
        super().__init__()
        self._opener = opener
        self._closer = closer
        self._marker = opener  # what there is content if this turns out to be no call
        self._mode: Callable[[bool], bool] = self._text
        self._scanner = CallScanner()
        self._announced = False

    def _advance(self, final: bool) -> bool:
        return self._mode(final)

    def _keep_from(self) -> int:
        return self._at if self._mode == self._text or self._announced else self._mark

    def _text(self, final: bool) -> bool:
        found = self._buffer.find(self._opener, self._at)
        if found < 0:
            end = len(self._buffer) - (0 if final else held_back(self._buffer, self._at, self._opener))
            self._emit_text(self._buffer[self._at : end])
            self._at = end
            return False
        self._emit_text(self._buffer[self._at : found])
        self._mark, self._marker = found, self._opener
        self._at = found + len(self._opener)
        self._announced = False
        self._begin()
        return True

    def _begin(self) -> None:
        """Right after an opener."""
        self._start_object(CallScanner())

    def _start_object(self, scanner: CallScanner) -> None:
        self._scanner = scanner
        self._announced = False
        self._mode = self._object

    def _object(self, final: bool) -> bool:
        state = Scan.MORE
        while state is Scan.MORE and self._at < len(self._buffer):
            state = self._scanner.feed(self._buffer[self._at])
            self._at += state is not Scan.BAD
        if state is Scan.MORE and final:
            self._scanner.cut_short()
        if self._scanner.ready or (state is Scan.MORE and final and self._scanner.named):
            self._announce()
            self._emit_arguments(self._scanner.take())
        if state is Scan.MORE:
            if final and not self._announced:
                self._give_up()
                return True
            return False
        if self._announced:
            self._mode = self._after
        else:
            self._give_up()
        return True

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._emit_call(self._scanner.name or "", self._scanner.id)

    def _give_up(self) -> None:
        """This was no call: its marker is content, and what follows it is read again."""
        self._at = self._mark + len(self._marker)
        self._emit_text(self._marker)
        self._mode = self._text

    def _after(self, final: bool) -> bool:
        rest = self._buffer[self._at :]
        bare = rest.lstrip()
        if self._closer.startswith(bare) and bare != self._closer and not final:
            return False
        if bare.startswith(self._closer):
            self._at += len(rest) - len(bare) + len(self._closer)
        elif final and self._closer.startswith(bare):  # cut short inside the closing marker
            self._at = len(self._buffer)
        self._mode = self._text
        return True


def held_back(text: str, start: int, *markers: str) -> int:
    """How many characters at the end of ``text``, from ``start`` on, may be the beginning of a marker."""
    longest = max(map(len, markers))
    for length in range(min(longest - 1, len(text) - start), 0, -1):
        if any(marker.startswith(text[len(text) - length :]) for marker in markers):
            return length
    return 0


def _joined(deltas: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One delta per call."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            last = joined[-1]
            joined[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return tuple(joined)
