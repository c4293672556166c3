"""What one schema of the collection consists of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A schema and a request that a user might make of it.

    Attributes:
        name: short, unique.
        prompt: what the user asks.
        text: the schema as JSON; the order of its keys is the order of the output's.
        model: the Pydantic class that it was made from, if any.
    """

    name: str
    prompt: str
    text: str
    model: Any = None

    @property
    def schema(self) -> dict[str, Any]:
        """The schema, parsed anew at every call."""
        schema: dict[str, Any] = json.loads(self.text)
        return schema
