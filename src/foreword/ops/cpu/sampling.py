"""Tokens drawn on the CPU, row by row: a step has few rows, and reading a number there waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from foreword.ops.protocol import Draw

if TYPE_CHECKING:
    from torch import Tensor

_PREFILTER = 1024  # top-p is nearly always reached within so many tokens; a full sort costs 20 times more


def draw(logits: Tensor, draws: Sequence[Draw], best: Sequence[int | None]) -> Tensor:
    """:meth:`foreword.ops.protocol.Ops.draw`, given the most likely tokens.

    Without top-k and top-p tokens lie in ascending order on the line on which ``u`` points, else from the most to the
    least likely.
    """
    tokens = np.array([-1 if token is None else token for token in best], np.int32)
    for row, how in enumerate(draws):
        if tokens[row] >= 0 and how.temperature:
            scaled = logits[row] / how.temperature
            if scaled[tokens[row]].isfinite():  # else all others are infinitely far from the most likely token
                tokens[row] = _draw(scaled, how)
    return torch.from_numpy(tokens)


def _draw(row: Tensor, how: Draw) -> int:
    """Inverse-transform sampling after top-k, top-p and min-p. ``row [V]``: logits over temperature."""
    if not how.top_k and how.top_p == 1.0:
        probabilities = row.softmax(dim=-1)
        return _pick(_drop_unlikely(probabilities, how.min_p), how.u)
    count = min(how.top_k or _PREFILTER, len(row))
    values, ids = row.topk(count)
    probabilities = torch.exp(values - (values if how.top_k else row).logsumexp(dim=-1))
    if not how.top_k and float(probabilities.sum()) < how.top_p:
        values, ids = row.sort(descending=True)
        probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = torch.where(before < how.top_p, probabilities, 0.0)
    kept[0] = probabilities[0]  # the most likely token always stays
    return int(ids[_pick(_drop_unlikely(kept, how.min_p), how.u)])


def _drop_unlikely(probabilities: Tensor, min_p: float) -> Tensor:
    if not min_p:
        return probabilities
    return torch.where(probabilities >= min_p * probabilities.max(), probabilities, 0.0)


def _pick(weights: Tensor, u: float) -> int:
    """The index at which the cumulated weights pass ``u`` of their sum; never one of weight 0."""
    cumulated = weights.double().cumsum(dim=-1)
    target = torch.tensor(u * float(cumulated[-1]), dtype=torch.float64)
    index = int(torch.searchsorted(cumulated, target, right=True))
    return index if index < len(weights) else int(weights.nonzero()[-1])
