"""What the decoder is given in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All sequences of a step as one flat batch of T tokens, padded to N rows.

    Attributes:
        token_ids: ``[N]`` int32.
        positions: ``[N]`` int32, counted from 0 in each sequence.
        slot_mapping: ``[T]`` int32, where each token's KV is written.
        attention: the backend's plan (see :meth:`foreword.ops.protocol.Ops.plan_attention`).
        outputs: ``[R]`` int32, the rows whose hidden states are wanted, strictly ascending. The last layer's MLP is
            computed for these alone.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: Any
    outputs: Tensor
