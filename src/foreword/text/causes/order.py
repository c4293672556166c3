"""The same things written otherwise: white space, JSON with its keys moved, tools and passages in another order."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from foreword.core.explanation import Cause
from foreword.text.passages import Span, passage_key

_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad"  # str.isspace does not know them
_SPACE = re.compile(rf"[\s{_INVISIBLE}]+")
_SEEN = 48  # visible characters that must agree behind a difference in white space
_CANDIDATES = 12  # brackets around a difference that are tried, from the outermost
_EXAMPLE = re.compile(
    r"^(?:[#*]+ ?)?(?:example|beispiel|exemple|ejemplo|q|question|input|user)\b ?#?\d*[.:)]", re.I | re.M
)
_TOOL_KEYS = frozenset(("parameters", "input_schema", "inputSchema", "arguments", "args", "description"))
_BESIDES = frozenset(("name", "type", "title", "strict", "returns", "annotations", "outputSchema", "required"))
_ALONE = 0.8  # of the characters of two texts that are the same but for their order


class Order(NamedTuple):
    """How two sequences compare: how many members both have, whether those come in another order, and their weight."""

    common: int
    is_moved: bool
    share: float


def order(expected: Sequence[Hashable], actual: Sequence[Hashable], weights: Sequence[int]) -> Order:
    """Compare two sequences; ``weights`` are those of ``actual``, and ``share`` is what the common members weigh.

    Members that come more than once have no place of their own: they only weigh.
    """
    first, second = Counter(expected), Counter(actual)
    weight = sum(weights[at] for at, item in enumerate(actual) if item in first)
    share = weight / total if (total := sum(weights)) else 0.0
    single = {item for item, count in first.items() if count == second[item] == 1}
    moved = [item for item in expected if item in single] != [item for item in actual if item in single]
    return Order(len(single), moved, share)


# -- white space ---------------------------------------------------------------------------------------------------


def is_whitespace(expected: str, actual: str, at: int, ends: tuple[int, int] | None = None) -> bool:
    """Whether the texts go on alike from ``at`` once white space is left out, and differ in nothing else there.

    Args:
        ends: where the message that holds the difference ends in the two texts, if it is the same; that is far enough.
    """
    if not any(_SPACE.match(char) for char in (expected[at : at + 1], actual[at : at + 1])):
        return False
    first, second = visible(expected, at), visible(actual, at)
    if ends and first != second:
        first, second = visible(expected[: ends[0]], at), visible(actual[: ends[1]], at)
        return first == second and len(first) < _SEEN
    return bool(first) and first == second


def visible(text: str, at: int) -> str:
    """The next visible characters."""
    return _SPACE.sub("", text[at : at + 16 * _SEEN])[:_SEEN]


# -- JSON ----------------------------------------------------------------------------------------------------------


def json_cause(expected: str, actual: str, at: int, begin: int) -> tuple[Cause | None, float | None] | None:
    """What JSON around ``at`` that starts at or behind ``begin`` tells: its keys, or a list's members, were moved.

    With the share of the characters of moved members that both lists have, for "document_order". The cause is None
    where a list got or lost members, and nothing else is to be looked for; without such JSON there is no answer.
    """
    for start in _brackets(actual, begin, at):
        first, second = _value(expected, start, at), _value(actual, start, at)
        if first is None or second is None:
            continue
        if canonical(first) == canonical(second):
            return ("json_key_order", None) if _spelled(first) != _spelled(second) else None
        if isinstance(first, list) and isinstance(second, list) and (found := _lists(first, second)):
            return found
    return _json_lines(expected, actual, at, begin)


def _brackets(text: str, begin: int, at: int) -> list[int]:
    """Brackets that are open at ``at``, the outermost first. Quotes are not read: what is no value is refused later."""
    open_: list[int] = []
    for match in re.finditer(r"[\[{}\]]", text[begin:at]):
        if match[0] in "[{":
            open_.append(begin + match.start())
        elif open_:
            open_.pop()
    return open_[:_CANDIDATES]


def _value(text: str, start: int, at: int) -> Any:
    """The value that starts at ``start`` and ends behind ``at``, as JSON or as Python prints it; None without one."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        return value if end > at and isinstance(value, (dict, list)) else None
    except ValueError:
        pass
    depth = 0
    for match in re.finditer(r"[\[{}\]]", text[start : start + 20_000]):
        depth += 1 if match[0] in "[{" else -1
        if depth == 0:
            try:
                value = ast.literal_eval(text[start : start + match.end()])
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
            return value if start + match.end() > at and isinstance(value, (dict, list)) else None
    return None


def _lists(first: list[Any], second: list[Any]) -> tuple[Cause | None, float | None] | None:
    if not all(isinstance(item, dict) for item in (*first, *second)):
        return None
    keys = [[canonical(item) for item in items] for items in (first, second)]
    found = order(keys[0], keys[1], [len(key) for key in keys[1]])
    if found.common < 2 or not found.is_moved:
        return (None, None) if len(first) != len(second) and found.common else None
    return ("tool_order", None) if all(is_tool(item) for item in second) else ("document_order", found.share)


def _json_lines(expected: str, actual: str, at: int, begin: int) -> tuple[Cause | None, float | None] | None:
    """The same for a value on each line."""
    start = max(actual.rfind("\n", 0, at) + 1, begin)
    runs: list[list[Any]] = []
    for text in (expected, actual):
        values = []
        for line in text[start : start + 100_000].split("\n"):
            value = _value(line.strip(), 0, 0) if line.strip().startswith("{") else None
            if not isinstance(value, dict):
                break
            values.append(value)
        runs.append(values)
    return _lists(runs[0], runs[1]) if min(map(len, runs)) > 1 else None


def is_tool(value: Any) -> bool:
    """Whether a JSON value looks like the definition of a tool: a name, a description or parameters, nothing else."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return (
        isinstance(function, Mapping)
        and "name" in function
        and bool(function.keys() & _TOOL_KEYS)
        and function.keys() <= _TOOL_KEYS | _BESIDES
    )


def canonical(value: Any) -> str:
    """One spelling for equal JSON values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def tools_cause(expected: Sequence[Mapping[str, Any]], actual: Sequence[Mapping[str, Any]]) -> Cause | None:
    """What differs between two lists of definitions, if nothing but order does."""
    first, second = ([canonical(tool) for tool in tools] for tools in (expected, actual))
    if first == second:
        return "json_key_order" if list(map(_spelled, expected)) != list(map(_spelled, actual)) else None
    found = order(first, second, [1] * len(second))
    return "tool_order" if found.common > 1 and found.is_moved else None


def _spelled(value: Any) -> str:
    return json.dumps(value, default=str)


# -- passages ------------------------------------------------------------------------------------------------------


def document_order(expected: str, actual: str, at: int, spans: tuple[list[Span], list[Span]]) -> float | None:
    """The share of the passages' characters that both texts have, if they have them in another order; else None.

    Args:
        expected, actual, at: the texts of two messages, and where they begin to differ.
        spans: the passages in them.
    """
    first, second = spans
    touched = any(start <= at <= end for start, end in (*first, *second))
    if touched and (share := _moved(expected, actual, first, second)) is not None:
        return share
    for split in (_examples, _paragraphs, _lines):
        pair = split(expected), split(actual)
        if min(map(len, pair)) < 2:
            continue
        share = _moved(expected, actual, *pair)
        if share is not None and share >= _ALONE:
            return share
    return None


def _moved(expected: str, actual: str, first: list[Span], second: list[Span]) -> float | None:
    keys = [
        [passage_key(text[start:end]) for start, end in spans] for text, spans in ((expected, first), (actual, second))
    ]
    kept = [
        [(key, end - start) for key, (start, end) in zip(pair, spans, strict=True) if key]
        for pair, spans in zip(keys, (first, second), strict=True)
    ]
    found = order([key for key, _ in kept[0]], [key for key, _ in kept[1]], [size for _, size in kept[1]])
    return found.share if found.common > 1 and found.is_moved else None


def _examples(text: str) -> list[Span]:
    starts = [match.start() for match in _EXAMPLE.finditer(text)]
    return list(zip(starts, [*starts[1:], len(text)][: len(starts)], strict=True))


def _paragraphs(text: str) -> list[Span]:
    borders = [match.span() for match in re.finditer(r"\n[ \t]*\n\s*", text)]
    starts, ends = [0, *(end for _, end in borders)], [*(start for start, _ in borders), len(text)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _lines(text: str) -> list[Span]:
    return [match.span() for match in re.finditer(r"\S[^\n]{11,}", text)]
