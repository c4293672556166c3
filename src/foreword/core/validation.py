"""One wording for every rejected option."""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

_SHOWN = 200
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def reject(field: str, value: Any, remedy: str) -> NoReturn:
    """Raise the ``ValueError`` for an option: it names the field, the value and the way out."""
    raise ValueError(f"{field}={shortened(value)} is not valid: {remedy}")


def shortened(value: Any) -> str:
    """A value as it is shown in a message: not a whole prompt."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def seconds(field: str, value: Any) -> float:
    """A time: a positive number of seconds, or text such as ``"30s"``, ``"5m"``, ``"1h"`` or ``"1d"``.

    Raises:
        ValueError: ``value`` is neither.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value) if isinstance(value, str) else None
    if match is not None:
        value = float(match[1]) * _UNITS[match[2]]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        reject(field, value, 'give a positive number of seconds, or text such as "30s", "5m" or "1h"')
    return float(value)
