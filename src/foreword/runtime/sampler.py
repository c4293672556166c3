"""The next token from logits. Every choice depends on its own row and request alone, never on its neighbours."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from foreword.core.outputs import TokenLogprobs
from foreword.core.sampling import SamplingParams
from foreword.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

_GREEDY_BELOW = 1e-5  # dividing by less overflows
_PREFILTER = 1024  # top-p is nearly always reached within so many tokens; a full sort costs 20 times more


class Sampler:
    """Chooses tokens.

    Args:
        eos_token_ids: the model's end tokens, held off by ``min_tokens``.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids

    def sample(self, logits: Tensor, sequence: Sequence, index: int) -> int:
        """The next token of completion ``index`` of ``sequence``. ``logits [V]`` float32.

        Raises:
            ValueError: the logits are not finite, or the grammar cannot go on.
        """
        token, constraint = self._choose(logits, sequence, index), sequence.constraint
        remaining = sequence.request.max_tokens - (len(sequence.token_ids) - sequence.num_prompt) - 1
        if constraint is None or constraint.leaves_room(token, remaining):
            return token
        return constraint.closing_token()

    def _choose(self, logits: Tensor, sequence: Sequence, index: int) -> int:
        params = sequence.request.params
        row = self._adjust(logits, sequence, params)
        best = int(row.argmax())
        if not torch.isfinite(row[best]):
            raise ValueError(f"the model gave logits that are not finite at position {len(sequence.token_ids) - 1}")
        if params.temperature < _GREEDY_BELOW:
            return best
        return _draw(row / params.temperature, params, uniform(sequence.request.seed, index, len(sequence.token_ids)))

    def _adjust(self, logits: Tensor, sequence: Sequence, params: SamplingParams) -> Tensor:
        """Bias, penalties, held-off end tokens and forbidden tokens, on a copy. ``[V]``"""
        num_generated = len(sequence.token_ids) - sequence.num_prompt
        row = logits.clone()
        for token, bias in params.logit_bias.items():
            row[token] += bias
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sequence.token_ids, device=row.device)  # repeats write the same value again
            values = row[seen]
            penalty = params.repetition_penalty
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if num_generated and (params.presence_penalty or params.frequency_penalty):
            generated = torch.tensor(sequence.token_ids[sequence.num_prompt :], device=row.device)
            ids, counts = generated.unique(return_counts=True)
            row[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if sequence.constraint is not None:
            bits = np.frombuffer(sequence.constraint.mask(), np.uint8)
            forbidden = np.unpackbits(bits, count=len(row), bitorder="little") == 0
            row[torch.from_numpy(forbidden).to(row.device)] = -torch.inf
        if num_generated < params.min_tokens:
            row = self._hold_off_ends(row, params)
        return row

    def _hold_off_ends(self, row: Tensor, params: SamplingParams) -> Tensor:
        ends = set(params.stop_token_ids) if params.ignore_eos else self._eos | set(params.stop_token_ids)
        held = row.clone()
        held[[token for token in ends if token < len(row)]] = -torch.inf
        # a constraint that is fulfilled allows an end and nothing else
        return held if bool((held > -torch.inf).any()) else row


def is_plain_greedy(sequence: Sequence) -> bool:
    """Whether the next token is the most likely one, with nothing adjusted or reported, in one completion."""
    params = sequence.request.params
    return (
        params.temperature < _GREEDY_BELOW
        and sequence.num_samples == 1
        and sequence.constraint is None
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and not (params.presence_penalty or params.frequency_penalty)
        and len(sequence.token_ids) - sequence.num_prompt >= params.min_tokens
    )


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: preemption, batching and forks cannot shift it."""
    digest = hashlib.blake2b(f"{seed}/{index}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def logprobs(logits: Tensor, chosen: int, top: int) -> TokenLogprobs:
    """Log-probabilities of ``chosen`` and of the ``top`` most likely tokens. ``logits [V]``, before any adjustment."""
    values = torch.log_softmax(logits, dim=-1)
    result = {chosen: float(values[chosen])}
    if top:
        best = values.topk(min(top, len(values)))
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            result.setdefault(token, value)
    return result


def _draw(row: Tensor, params: SamplingParams, u: float) -> int:
    """Inverse-transform sampling after top-k, top-p and min-p. ``row [V]``: logits over temperature."""
    if not params.top_k and params.top_p == 1.0:
        probabilities = row.softmax(dim=-1)
        return _pick(_drop_unlikely(probabilities, params.min_p), u)
    count = min(params.top_k or _PREFILTER, len(row))
    values, ids = row.topk(count)
    probabilities = torch.exp(values - (values if params.top_k else row).logsumexp(dim=-1))
    if not params.top_k and float(probabilities.sum()) < params.top_p:
        values, ids = row.sort(descending=True)
        probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = torch.where(before < params.top_p, probabilities, 0.0)
    kept[0] = probabilities[0]  # the most likely token always stays
    return int(ids[_pick(_drop_unlikely(kept, params.min_p), u)])


def _drop_unlikely(probabilities: Tensor, min_p: float) -> Tensor:
    if not min_p:
        return probabilities
    return torch.where(probabilities >= min_p * probabilities.max(), probabilities, 0.0)


def _pick(weights: Tensor, u: float) -> int:
    """The index at which the cumulated weights pass ``u`` of their sum; never one of weight 0."""
    cumulated = weights.double().cumsum(dim=-1)
    target = u * float(cumulated[-1])
    index = int(
        torch.searchsorted(cumulated, torch.tensor(target, dtype=torch.float64, device=weights.device), right=True)
    )
    return index if index < len(weights) else int(weights.nonzero()[-1])
