"""One wording for every rejected option."""

from __future__ import annotations

from typing import Any, NoReturn


def reject(field: str, value: Any, remedy: str) -> NoReturn:
    """Raise the ``ValueError`` for an option: it names the field, the value and the way out."""
    raise ValueError(f"{field}={value!r} is not valid: {remedy}")
