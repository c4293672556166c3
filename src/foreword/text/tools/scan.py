"""A tool call written as a JSON object, read one character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum

_SPACE = " \t\r\n"
_SCALAR = frozenset("+-.0123456789eEtrufalsn")
_INSIDE = frozenset('{}[],:"' + _SPACE) | _SCALAR
_CLOSES = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")


class Scan(Enum):
    """What a character did: the object goes on, ends with it, or cannot go on with it."""

    MORE = 0
    DONE = 1
    BAD = 2


class CallScanner:
    """Reads ``{"name": ..., "arguments": {...}}`` with its keys in any order.

    ``parameters`` stands for ``arguments`` as well, arguments may be a JSON string that holds the object, other keys
    are passed over, and ``{"type": "function", "function": {...}}`` is understood.

    Args:
        exact: take nothing but a name and arguments (and a ``type``), and insist on both. For formats without
            markers, where any other object is an answer, not a call.

    Attributes:
        name: of the tool, once it is known.
        id: the call's own, if it carries one.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self._exact = exact
        self._step: Callable[[str], Scan] = self._start
        self._key = ""
        self._value: list[str] = []
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] | None = None  # what has been read of them
        self._taken = 0

    @property
    def ready(self) -> bool:
        """Whether this is a call beyond doubt: it has a name, and its arguments have begun."""
        return self.name is not None and self._arguments is not None

    @property
    def named(self) -> bool:
        """Whether a text that ends here was a call that had come at least as far as its name."""
        return self.ready or (self.name is not None and not self._exact)

    def take(self) -> str:
        """The text of the arguments that is new since the last call of this."""
        if self._arguments is None:
            return ""
        new = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return new

    def cut_short(self) -> None:
        """The text ends here: count what there is of arguments that were being given as a JSON string."""
        if self._arguments is None and self._key in _ARGUMENTS and self._step == self._string_value:
            text = "".join(self._value)
            endings = (_string(text[: len(text) - cut] + '"') for cut in range(min(6, len(text))))
            self._arguments = [next((found for found in endings if found is not None), "")]

    def feed(self, char: str) -> Scan:
        """Read one character."""
        return self._step(char)

    def _start(self, char: str) -> Scan:
        if char == "{":
            self._step = self._key_start
            return Scan.MORE
        return Scan.MORE if char in _SPACE else Scan.BAD

    def _key_start(self, char: str) -> Scan:
        if char == '"':
            self._value = [char]
            self._step = self._key_text
            return Scan.MORE
        if char == "}":
            return self._end()
        return Scan.MORE if char in _SPACE else Scan.BAD

    def _key_text(self, char: str) -> Scan:
        if self._string_goes_on(char):
            return Scan.MORE
        key = _string("".join(self._value))
        if key is None or (self._exact and key not in ("type", "name", *_ARGUMENTS)):
            return Scan.BAD
        self._key = key
        self._step = self._colon
        return Scan.MORE

    def _colon(self, char: str) -> Scan:
        if char == ":":
            self._step = self._value_start
            return Scan.MORE
        return Scan.MORE if char in _SPACE else Scan.BAD

    def _value_start(self, char: str) -> Scan:
        if char in _SPACE:
            return Scan.MORE
        self._value = [char]
        if char == '"':
            self._step = self._string_value
        elif char in _CLOSES:
            if self._key in _ARGUMENTS and self._arguments is None:
                if char == "[":
                    return Scan.BAD
                self._value = self._arguments = ["{"]
            self._closers = [_CLOSES[char]]
            self._in_string = False
            self._step = self._container
        elif char in _SCALAR:
            self._step = self._scalar
        else:
            return Scan.BAD
        return Scan.MORE

    def _string_goes_on(self, char: str) -> bool:
        self._value.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        else:
            return char != '"'
        return True

    def _string_value(self, char: str) -> Scan:
        return Scan.MORE if self._string_goes_on(char) else self._end_value()

    def _container(self, char: str) -> Scan:
        if self._in_string:
            self._in_string = self._string_goes_on(char)
            return Scan.MORE
        if char not in _INSIDE or (char in "}]" and char != self._closers[-1]):
            return Scan.BAD
        self._value.append(char)
        if char == '"':
            self._in_string = True
        elif char in _CLOSES:
            self._closers.append(_CLOSES[char])
        elif char in "}]":
            self._closers.pop()
            if not self._closers:
                return self._end_value()
        return Scan.MORE

    def _scalar(self, char: str) -> Scan:
        if char in _SCALAR:
            self._value.append(char)
            return Scan.MORE
        ended = self._end_value()
        return ended if ended is Scan.BAD else self._after_value(char)

    def _after_value(self, char: str) -> Scan:
        if char == ",":
            self._step = self._key_start
            return Scan.MORE
        if char == "}":
            return self._end()
        return Scan.MORE if char in _SPACE else Scan.BAD

    def _end_value(self) -> Scan:
        self._step = self._after_value
        text = "".join(self._value)
        understood = True
        if self._key == "name" or (self._key == "function" and text.startswith('"')):
            if self.name is None:
                self.name = _string(text) or None
            understood = self.name is not None
        elif self._key == "id":
            self.id = _string(text)
        elif self._key in _ARGUMENTS and self._value is not self._arguments and self._arguments is None:
            given = "{}" if text == "null" else _string(text)
            understood = given is not None and _is_object(given)
            self._arguments = [given] if understood and given else None
        elif self._key == "function" and not self.ready:
            self._read_function(text)
        return Scan.MORE if understood else Scan.BAD

    def _read_function(self, text: str) -> None:
        inner = CallScanner()
        if [inner.feed(char) for char in text][-1] is Scan.DONE:
            self.name, self._arguments = inner.name, [inner.take()]

    def _end(self) -> Scan:
        if self.name is None or (self._exact and self._arguments is None):
            return Scan.BAD
        if self._arguments is None:
            self._arguments = ["{}"]
        return Scan.DONE


class ArgumentsScanner(CallScanner):
    """Reads the object of arguments alone, of a call whose name was written before it."""

    def __init__(self, name: str, call_id: str | None = None) -> None:
        super().__init__()
        self.name, self.id = name, call_id
        self._key = "arguments"
        self._step = self._value_start

    def _end_value(self) -> Scan:
        return Scan.DONE if super()._end_value() is Scan.MORE else Scan.BAD


def _string(text: str) -> str | None:
    """The value of a JSON string, None if ``text`` is none."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
