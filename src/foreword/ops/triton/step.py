"""What a step's attention reads besides keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from foreword.ops.protocol import AttentionSequence
from foreword.ops.transfer import upload
from foreword.ops.triton.plan import AttentionPlan

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True, eq=False)
class StepPlans:
    """A step's attention: a plan for each window that a layer asks for, made when it first does.

    Attributes:
        positions: ``[T]`` int32, of the tokens.
    """

    positions: Tensor
    sequences: Sequence[AttentionSequence] = ()
    by_window: dict[int | None, AttentionPlan] = field(default_factory=dict)

    @classmethod
    def create(cls, sequences: Sequence[AttentionSequence], device: torch.device) -> StepPlans:
        ranges = [np.arange(each.kv_len - each.query_len, each.kv_len, dtype=np.int32) for each in sequences]
        return cls(upload(np.concatenate([np.zeros(0, dtype=np.int32), *ranges]), device), sequences)

    @property
    def decodes(self) -> bool:
        """Every sequence has one token."""
        return all(sequence.query_len == 1 for sequence in self.sequences)
