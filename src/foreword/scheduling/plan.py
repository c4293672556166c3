"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foreword.kv.table import BlockCopy
from foreword.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """``length`` tokens of a sequence from position ``start``, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_last(self) -> bool:
        """Whether the logits behind this chunk give the next token."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: block copies to carry out first, then the chunks."""

    copies: list[BlockCopy]
    chunks: list[Chunk]


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; see ``EngineStats`` for their meaning."""

    prompt_tokens: int = 0
    tokens_reused: int = 0
    tokens_prefilled: int = 0
    preemptions: int = 0
