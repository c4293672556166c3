"""What a request changes about its logits before a token is drawn, for all rows of a step at once.

What is to be changed is put together on the host, row by row, and goes to the device in one piece of each kind. There,
each kind of change is a scatter, and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foreword.ops.transfer import upload
from foreword.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class Adjustments:
    """Bias, penalties, forbidden tokens and held-off end tokens of a step's rows.

    Args:
        vocabulary: logits of a row.
        eos_token_ids: the model's end tokens, held off by ``min_tokens``.
    """

    def __init__(self, vocabulary: int, eos_token_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._eos = eos_token_ids
        self._biases = _Changes()
        self._repetitions = _Changes()
        self._counts = _Changes()
        self._ends = _Changes()
        self._masks: list[tuple[int, NDArray[np.uint8]]] = []

    def add(self, row: int, sequence: Sequence) -> None:
        """What ``sequence`` changes about ``row``.

        Raises:
            ValueError: its grammar cannot go on.
        """
        params, start = sequence.request.params, row * self._vocabulary
        num_generated = len(sequence.token_ids) - sequence.num_prompt
        if sequence.constraint is not None:
            self._masks.append((row, np.frombuffer(sequence.constraint.mask(), np.uint8)))
        if params.logit_bias:
            self._biases.add(start, list(params.logit_bias), list(params.logit_bias.values()))
        if params.repetition_penalty != 1.0:
            self._repetitions.add(start, sequence.token_ids, params.repetition_penalty)
        if num_generated and (params.presence_penalty or params.frequency_penalty):
            tokens, counts = np.unique(sequence.token_ids[sequence.num_prompt :], return_counts=True)
            frequency = np.float32(params.frequency_penalty) * counts.astype(np.float32)
            self._counts.add(start, tokens, -(np.float32(params.presence_penalty) + frequency))
        if num_generated < params.min_tokens:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos)
            self._ends.add(start, [token for token in ends if token < self._vocabulary], -np.inf)

    def apply(self, logits: Tensor) -> Tensor:
        """``logits [R, V]`` with all of it; a copy if there is any."""
        kinds = (self._biases, self._repetitions, self._counts, self._ends)
        if not self._masks and not any(kind.places for kind in kinds):
            return logits
        rows = logits.clone(memory_format=torch.contiguous_format)
        flat = rows.view(-1)
        biases, repetitions, counts, ends = _uploaded(kinds, logits.device)
        if self._biases.places:
            flat.index_add_(0, biases.places, biases.numbers)
        if self._repetitions.places:  # repeated tokens write the same value again
            values, penalties = flat[repetitions.places], repetitions.numbers
            flat.index_copy_(0, repetitions.places, torch.where(values > 0, values / penalties, values * penalties))
        if self._counts.places:
            flat.index_add_(0, counts.places, counts.numbers)
        if self._masks:
            self._forbid(rows)
        if self._ends.places:
            _hold_off(rows, ends)
        return rows

    def _forbid(self, rows: Tensor) -> None:
        """Unpack the bits of the tokens that may come, and take away all others."""
        packed = np.zeros((len(self._masks), -(-self._vocabulary // 8)), np.uint8)
        for bits, (_, mask) in zip(packed, self._masks, strict=True):
            bits[: len(mask)] = mask[: len(bits)]
        number = upload(np.array([row for row, _ in self._masks]), rows.device)
        bit = torch.arange(8, dtype=torch.uint8, device=rows.device)
        allowed = (upload(packed, rows.device).unsqueeze(-1) >> bit & 1).view(len(packed), -1)  # [M, V rounded up]
        forbidden = allowed[:, : self._vocabulary] == 0
        rows.index_copy_(0, number, rows.index_select(0, number).masked_fill_(forbidden, -torch.inf))


class _Changes:
    """Changes of one kind to single logits, of all rows."""

    def __init__(self) -> None:
        self.places: list[NDArray[np.int64]] = []
        self.numbers: list[NDArray[np.float32]] = []

    def add(self, start: int, tokens: list[int] | NDArray[np.int64], numbers: object) -> None:
        """``numbers``: one for each of ``tokens``, or one for all; ``start``: where the row begins."""
        if len(tokens):
            self.places.append(np.asarray(tokens, np.int64) + start)
            self.numbers.append(np.broadcast_to(np.asarray(numbers, np.float32), len(tokens)))


class _Uploaded(NamedTuple):
    """Changes on the device: places in the flat rows, int64, and float32 numbers."""

    places: Tensor
    numbers: Tensor


def _uploaded(kinds: Iterable[_Changes], device: torch.device) -> Iterable[_Uploaded]:
    """All kinds in two transfers."""
    kinds = list(kinds)
    sizes = [sum(map(len, kind.places)) for kind in kinds]
    places = [np.zeros(0, np.int64), *(each for kind in kinds for each in kind.places)]
    numbers = [np.zeros(0, np.float32), *(each for kind in kinds for each in kind.numbers)]
    split = (upload(np.concatenate(each), device).split(sizes) for each in (places, numbers))
    return map(_Uploaded, *split)


def _hold_off(rows: Tensor, ends: _Uploaded) -> None:
    """Take away the end tokens, but not from a row that has nothing else: a constraint that is fulfilled allows an end
    and nothing else."""
    flat = rows.view(-1)
    before = flat[ends.places]
    flat.index_copy_(0, ends.places, ends.numbers)
    has_others = (rows > -torch.inf).any(dim=1)[ends.places // rows.shape[1]]
    flat.index_copy_(0, ends.places, torch.where(has_others, ends.numbers, before))
