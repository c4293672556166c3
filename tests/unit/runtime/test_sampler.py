"""Sampling against plain, slow references, token by token and as distributions."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword import SamplingParams
from foreword.core.request import Request
from foreword.ops.cpu import CpuOps
from foreword.runtime.report import logprobs
from foreword.runtime.sampler import Sampler, uniform
from foreword.scheduling.sequence import Sequence

V = 50
EOS = 3
SAMPLER = Sampler(frozenset({EOS}))
OPS = CpuOps(torch.float32, 1)


def sequence(params: SamplingParams, prompt: list[int], generated: list[int], seed: int = 0) -> Sequence:
    made = Sequence(Request("r", 0, prompt, params, b"", 0.0, 100, seed))
    made.token_ids += generated
    return made


def sample(
    logits: Tensor,
    *,
    prompt: tuple[int, ...] = (1,),
    generated: tuple[int, ...] = (),
    seed: int = 0,
    index: int = 0,
    **options: Any,
) -> int:
    state = sequence(SamplingParams(**options), list(prompt), list(generated), seed)
    state.index, state.num_samples = index, 1
    [made] = SAMPLER.sample([state], logits[None], OPS)
    assert (made.sequence, made.index) == (state, index)
    if made.error is not None:
        raise made.error
    return made.token_id


def reference_distribution(logits: list[float], options: dict[str, Any]) -> dict[int, float]:
    """Temperature, then top-k, then top-p, then min-p, each on what the one before has left, in plain Python."""
    scaled = [value / options.get("temperature", 1.0) for value in logits]
    top = max(scaled)
    weights = {i: math.exp(value - top) for i, value in enumerate(scaled)}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if options.get("top_k"):
        ranked = ranked[: options["top_k"]]
    total = sum(weights[i] for i in ranked)
    kept, before = [], 0.0
    for token in ranked:
        if before < options.get("top_p", 1.0) or not kept:
            kept.append(token)
        before += weights[token] / total
    kept = [i for i in kept if weights[i] >= options.get("min_p", 0.0) * weights[kept[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 5}, {"top_k": 500}, {"top_p": 0.5},
    {"top_p": 0.95}, {"top_p": 1e-9}, {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 10, "top_p": 0.7},
    {"top_p": 0.8, "min_p": 0.1, "temperature": 1.5}, {"top_k": 8, "min_p": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_distribution_is_the_references(options: dict[str, Any]) -> None:
    """2,000 draws with fixed seeds: nothing outside the reference's set, and frequencies within chance of its own."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(5)) * 2
    wanted = reference_distribution(logits.tolist(), options)
    draws = 2000
    found = Counter(sample(logits, seed=seed, **options) for seed in range(draws))
    assert set(found) <= set(wanted)
    for token, share in wanted.items():
        spread = math.sqrt(share * (1 - share) / draws)
        assert abs(found[token] / draws - share) <= 4.5 * spread + 1e-9, (token, share, found[token] / draws)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_vocabulary_larger_than_the_prefilter(options: dict[str, Any]) -> None:
    """With 5,000 nearly equal tokens, where top-p needs more than the prefiltered ones, the set is still right."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(6)) * 0.1
    wanted = reference_distribution(logits.tolist(), options)
    found = {sample(logits, seed=seed, **options) for seed in range(120)}
    borderline = 2 if options.get("top_p", 1.0) < 1 else 0  # float32 sums against Python's
    assert len(found - set(wanted)) <= borderline
    if len(wanted) > 2000:
        assert len(found) > 90


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    """Temperature 0 takes the argmax, whatever else is set; so does a temperature that would overflow."""
    logits = torch.zeros(V)
    logits[[7, 30]] = 2.0
    for options in ({}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}, {"seed": 9}):
        for temperature in (0.0, 1e-30, 1e-6):
            assert sample(logits, temperature=temperature, **options) == 7


def penalised(logits: Tensor, prompt: list[int], generated: list[int], options: dict[str, Any]) -> list[float]:
    """Bias and penalties in plain Python."""
    row = logits.tolist()
    for token, bias in options.get("logit_bias", {}).items():
        row[token] += bias
    for token in set(prompt + generated):
        penalty = options.get("repetition_penalty", 1.0)
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, count in Counter(generated).items():
        row[token] -= options.get("presence_penalty", 0.0) + count * options.get("frequency_penalty", 0.0)
    if len(generated) < options.get("min_tokens", 0):
        for token in {EOS, *options.get("stop_token_ids", ())}:
            row[token] = -math.inf
    return row


@pytest.mark.parametrize("seed", range(60))
def test_bias_and_penalties_against_the_reference(seed: int) -> None:
    """Random histories and options: the adjusted row is the reference's to float32's precision."""
    rng = random.Random(seed)
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
    original = logits.clone()
    prompt, generated = rng.choices(range(V), k=rng.randint(1, 30)), rng.choices(range(V), k=rng.randint(0, 30))
    options: dict[str, Any] = {
        "repetition_penalty": rng.choice([1.0, 1.3, 0.7]),
        "presence_penalty": rng.choice([0.0, 1.5, -2.0]),
        "frequency_penalty": rng.choice([0.0, 0.5, -0.5]),
        "min_tokens": rng.choice([0, 5, 40]),
        "stop_token_ids": tuple(rng.choices(range(V), k=rng.randint(0, 2))),
        "logit_bias": {token: rng.uniform(-5, 5) for token in rng.choices(range(V), k=rng.randint(0, 4))},
    }
    state = sequence(SamplingParams(**options), prompt, generated)
    [row], errors = SAMPLER.adjust([state], logits[None])
    assert not errors
    assert row.tolist() == pytest.approx(penalised(logits, prompt, generated, options), rel=1e-5, abs=1e-5)
    assert torch.equal(logits, original), "the caller's logits were changed"


def test_end_tokens_are_held_off_by_min_tokens() -> None:
    """End and stop tokens cannot be chosen before ``min_tokens``; with ignore_eos only stop tokens are held off."""
    logits = torch.zeros(V)
    logits[EOS], logits[9], logits[20] = 9.0, 8.0, 7.0
    options: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (9,), "min_tokens": 2}
    assert sample(logits, generated=(1,), **options) == 20
    assert sample(logits, generated=(1, 1), **options) == EOS
    assert sample(logits, generated=(1,), ignore_eos=True, **options) == EOS


def test_choices_depend_on_nothing_but_the_request() -> None:
    """The random number is a function of seed, completion and position: neighbours cannot shift it."""
    logits = torch.zeros(V)
    alone = [sample(logits, seed=5, generated=(1,) * n) for n in range(20)]
    mixed = []
    for n in range(20):
        sample(logits, seed=6)
        mixed.append(sample(logits, seed=5, generated=(1,) * n))
    assert mixed == alone
    assert len(set(alone)) > 5
    children = [[sample(logits, seed=5, index=index, generated=(1,) * n) for n in range(20)] for index in range(8)]
    assert len({tuple(child) for child in children}) == 8, "n children draw the same numbers"
    assert children[0] == alone


def test_uniform_is_uniform() -> None:
    """Numbers in [0, 1), spread evenly over seeds, completions and positions; 1/11 is not 11/1."""
    numbers = [uniform(seed, index, position) for seed in range(20) for index in range(5) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert all(0 <= number < 1 for number in numbers)
    buckets = Counter(int(number * 10) for number in numbers)
    assert all(abs(count - 1000) < 150 for count in buckets.values())
    assert uniform(1, 11, 1) != uniform(11, 1, 1) != uniform(1, 1, 11)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    """NaN or infinity where the choice falls is a ValueError with the position."""
    logits = torch.zeros(V)
    logits[4] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite at position 2"):
            sample(logits, generated=(1, 1), temperature=temperature)
    with pytest.raises(ValueError, match="not finite"):
        sample(torch.full((V,), -math.inf))


def test_tokens_at_minus_infinity_are_never_drawn() -> None:
    """A row with -inf entries (a grammar's mask, held-off ends) samples from the rest, to the end of the range."""
    logits = torch.full((V,), -math.inf)
    logits[[0, V - 1]] = 0.0
    for options in ({}, {"top_p": 0.99}, {"top_k": 10}, {"min_p": 0.1}):
        assert {sample(logits, seed=seed, **options) for seed in range(50)} == {0, V - 1}


def test_logprobs_hold_the_chosen_and_the_most_likely() -> None:
    """The chosen token comes with the ``top`` most likely ones, each once, as log-softmax of the raw logits."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1))
    wanted = logits.log_softmax(0)
    ranked = wanted.argsort(descending=True).tolist()
    for top, chosen in ((0, ranked[3]), (2, ranked[3]), (5, ranked[3]), (V + 10, ranked[3])):
        [found] = logprobs(logits[None], [chosen], top)
        assert set(found) == {chosen, *ranked[:top]}
        assert found == pytest.approx({token: float(wanted[token]) for token in found})
