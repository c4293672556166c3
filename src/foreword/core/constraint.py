"""What the layers below know of a grammar."""

from __future__ import annotations

from typing import Protocol


class Constraint(Protocol):
    """Which tokens may come next in one completion, and how far it is. Belongs to the engine thread.

    It depends on the tokens generated so far alone, so a preempted sequence keeps it while its KV is computed again.
    """

    def mask(self) -> bytes:
        """One bit per token id, ``[V / 8]`` bytes, the lowest bit first: whether the token may come next."""

    def advance(self, token_id: int) -> None:
        """Take the next token. Raises ``ValueError`` if it is not allowed."""

    def fork(self) -> Constraint:
        """A copy that goes its own way."""

    def leaves_room(self, token_id: int, remaining: int) -> bool:
        """Whether the output can still be ended properly with ``remaining`` tokens behind ``token_id``."""

    def closing_token(self) -> int:
        """The token to take instead, where it cannot."""

    @property
    def closed_early(self) -> bool:
        """Whether a closing token had to be taken."""

    @property
    def complete(self) -> bool:
        """Whether the output matches as it is."""

    @property
    def finished(self) -> bool:
        """Whether nothing more can follow."""
