"""The next tokens from logits: adjust the rows, draw, record what was drawn.

Every choice depends on its own row and request alone, never on its neighbours. The host waits for the device once in a
step, to read the tokens and the log-probabilities that were asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from foreword.core.outputs import TokenLogprobs
from foreword.ops.protocol import Draw, Ops
from foreword.ops.transfer import upload
from foreword.runtime.adjust import Adjustments
from foreword.runtime.report import entries, logprobs, read_back, report
from foreword.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

_GREEDY_BELOW = 1e-5  # dividing by less overflows
_MOST_TOP_K = 2**31 - 1  # more than any vocabulary has; devices do not hold every integer


@dataclass(frozen=True, slots=True)
class Sample:
    """A token chosen for completion ``index`` behind ``sequence``, or the reason why none could be."""

    sequence: Sequence
    index: int
    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Completion:
    """Completion ``index`` of ``sequence``, whose next token the logits' row ``row`` gives."""

    row: int
    sequence: Sequence
    index: int


class Sampler:
    """Chooses tokens.

    Args:
        eos_token_ids: the model's end tokens, held off by ``min_tokens``.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids

    def sample(self, sequences: Seq[Sequence], logits: Tensor, ops: Ops) -> list[Sample]:
        """The next token of every completion of ``sequences``, one row each of ``logits [R, V]`` float32. A sample
        whose logits are not finite, or whose grammar cannot go on, has its error; the others have their tokens."""
        adjusted, errors = self.adjust(sequences, logits)
        completions = [
            _Completion(row, sequence, index)
            for row, sequence in enumerate(sequences)
            for index in range(sequence.index, sequence.index + sequence.num_samples)
        ]
        if len(completions) > len(sequences):
            adjusted = adjusted[upload(np.array([each.row for each in completions]), logits.device)]
        drawn = ops.draw(adjusted, [how_to_draw(each.sequence, each.index) for each in completions])  # [C]
        tokens, reported = _record(completions, logits, drawn)
        samples = []
        for number, each in enumerate(completions):
            try:
                if each.row in errors:
                    raise errors[each.row]
                token = self.settle(each.sequence, tokens[number])
                if token != tokens[number] and number in reported:
                    top = each.sequence.request.params.logprobs or 0
                    [reported[number]] = logprobs(logits[each.row : each.row + 1], [token], top)
                samples.append(Sample(each.sequence, each.index, token, reported.get(number)))
            except Exception as error:  # one request's trouble is not its neighbours'
                samples.append(Sample(each.sequence, each.index, error=error))
        return samples

    def adjust(self, sequences: Seq[Sequence], logits: Tensor) -> tuple[Tensor, dict[int, Exception]]:
        """The rows with all that the requests change about them, and errors by row; such rows stay as they are."""
        adjustments, errors = Adjustments(logits.shape[1], self._eos), dict[int, Exception]()
        for row, sequence in enumerate(sequences):
            try:
                adjustments.add(row, sequence)
            except Exception as error:
                errors[row] = error
        return adjustments.apply(logits), errors

    def settle(self, sequence: Sequence, token: int) -> int:
        """What a drawn token becomes: itself, or the one that closes an output which would not end in time.

        Raises:
            ValueError: none was drawn, as the logits are not finite.
        """
        num_tokens, constraint = len(sequence.token_ids), sequence.constraint
        if token < 0:
            raise ValueError(f"the model gave logits that are not finite at position {num_tokens - 1}")
        remaining = sequence.request.max_tokens - (num_tokens - sequence.num_prompt) - 1
        if constraint is None or constraint.leaves_room(token, remaining):
            return token
        return constraint.closing_token()


def _record(completions: Seq[_Completion], logits: Tensor, drawn: Tensor) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """What was drawn for each completion, and by the completion's number the log-probabilities that are asked for: all
    of it is read at once. ``logits``: before any adjustment."""
    by_top: dict[int, list[int]] = {}
    for number, each in enumerate(completions):
        top = each.sequence.request.params.logprobs
        if top is not None:
            by_top.setdefault(top, []).append(number)
    reports = []
    for top, numbers in by_top.items():
        rows, places = upload(np.array([[completions[number].row for number in numbers], numbers]), logits.device)
        reports.append(report(logits[rows], drawn[places], top))
    tokens, *read = read_back([drawn, *chain(*reports)])
    return tokens.tolist(), dict(zip(chain(*by_top.values()), entries(read), strict=True))


def how_to_draw(sequence: Sequence, index: int) -> Draw:
    """The settings of the next token of completion ``index`` of ``sequence``."""
    params = sequence.request.params
    if params.temperature < _GREEDY_BELOW:
        return Draw()
    u = uniform(sequence.request.seed, index, len(sequence.token_ids))
    return Draw(params.temperature, min(params.top_k, _MOST_TOP_K), params.top_p, params.min_p, u)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: preemption, batching and forks cannot shift it."""
    digest = hashlib.blake2b(f"{seed}/{index}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
