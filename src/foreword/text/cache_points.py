"""Cache points: where a caller marked messages or tools with ``cache_control``, to keep the prompt up to there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foreword.core.validation import reject

TTLS = {"5m": 300.0, "1h": 3600.0}
"""Seconds by their names in ``cache_control``; the first is the default."""


class CachePoint(NamedTuple):
    """ "Keep the prompt up to here."

    Attributes:
        ttl_s: seconds for which it is kept.
        message: index of the message that holds the place; None for a place among the tools.
        offset: characters of the message's content before the place; or the index of the last tool before it.
    """

    ttl_s: float
    message: int | None
    offset: int


def points_in_messages(messages: Sequence[Mapping[str, Any]]) -> list[CachePoint]:
    """The points in checked messages whose contents are lists of parts, in order.

    Raises:
        ValueError: a ``cache_control`` is not valid; names its place.
    """
    found = []
    for index, message in enumerate(messages):
        content, length = message.get("content"), 0
        for number, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            length += len(part if isinstance(part, str) else part["text"])
            control = None if isinstance(part, str) else part.get("cache_control")
            if control is not None:
                ttl_s = _ttl(f"messages[{index}].content[{number}].cache_control", control)
                found.append(CachePoint(ttl_s, index, length))
    return found


def split_tools(tools: Sequence[Any]) -> tuple[list[Any], tuple[CachePoint, ...]]:
    """Tools without their marks, which no prompt shows, and the points they mark: behind the marked tool.

    Raises:
        ValueError: a ``cache_control`` is not valid; names its place.
    """
    plain, found = [], []
    for index, tool in enumerate(tools):
        if isinstance(tool, Mapping) and "cache_control" in tool:
            if tool["cache_control"] is not None:
                found.append(CachePoint(_ttl(f"tools[{index}].cache_control", tool["cache_control"]), None, index))
            tool = {key: value for key, value in tool.items() if key != "cache_control"}
        plain.append(tool)
    return plain, tuple(found)


def _ttl(field: str, control: Any) -> float:
    known = isinstance(control, Mapping) and control.get("type") == "ephemeral" and not control.keys() - {"type", "ttl"}
    ttl = (control.get("ttl") or "5m") if known else None
    if not isinstance(ttl, str) or ttl not in TTLS:
        reject(field, control, 'give {"type": "ephemeral"}, if need be with "ttl": "5m" or "1h"')
    return TTLS[ttl]
