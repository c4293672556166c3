"""Log-probabilities, computed on the device and read from it together with whatever else is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foreword.core.outputs import TokenLogprobs
from foreword.ops.transfer import upload

if TYPE_CHECKING:
    from torch import Tensor


class Report(NamedTuple):
    """Log-probabilities of one token of each of ``C`` rows, and of the ``top`` most likely ones.

    Attributes:
        tokens, values: ``[C]`` int32 and float32.
        top_tokens, top_values: ``[C, top]`` int32 and float32, the most likely first.
    """

    tokens: Tensor
    values: Tensor
    top_tokens: Tensor
    top_values: Tensor


def report(logits: Tensor, tokens: Tensor, top: int) -> Report:
    """Of ``tokens [C]`` int32 in ``logits [C, V]``, before any adjustment; what stands for a token that is -1 means
    nothing."""
    values = logits.log_softmax(dim=-1)
    chosen = values.gather(1, tokens.long().clamp(min=0).unsqueeze(1)).squeeze(1)
    best = values.topk(min(top, values.shape[1]))
    return Report(tokens, chosen, best.indices.int(), best.values)


def read_back(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors``, of elements of 32 bits and on one device, on the host: this waits for the device, once."""
    if len(tensors) == 1:
        return [tensors[0].cpu()]
    words = torch.cat([each.reshape(-1).view(torch.int32) for each in tensors]).cpu()
    parts = words.split([each.numel() for each in tensors])
    return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def entries(read: Sequence[Tensor]) -> list[TokenLogprobs]:
    """Of reports whose tensors were read back, one report behind the other: a mapping for each row, the token itself
    first."""
    result = []
    for first in range(0, len(read), len(Report._fields)):
        columns = [each.tolist() for each in read[first : first + len(Report._fields)]]
        for token, value, top_tokens, top_values in zip(*columns, strict=True):
            row = {token: value}
            for other, its_value in zip(top_tokens, top_values, strict=True):
                row.setdefault(other, its_value)
            result.append(row)
    return result


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of ``tokens``, one for each row of ``logits [C, V]``, and of the ``top`` most likely ones; waits for the
    device."""
    chosen = upload(np.array(tokens, np.int32), logits.device)
    return entries(read_back(report(logits, chosen, top)))
