"""The default model against transformers' own implementation of it, in float32 and in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from foreword import Engine
from foreword.text.conversation import encode_chat
from support import generate_recorded

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 16
FLOAT32_TOLERANCE = 1e-3
"""Measured: 1.5e-4."""
SHORT = 8
BFLOAT16_TOLERANCE = {True: 2.5, False: 1.0}
"""For prompts under SHORT tokens, and others. Measured: 2.1 and 0.74, of logits that spread over about 40. The first
token's residual stream is hundreds of times larger than the others', and so is its rounding error: transformers' own
bfloat16 is 1.3 from its float32 there."""


def journal(days: int) -> str:
    """About 27 tokens a day."""
    days_text = (
        f"Entry {n}: on day {n} the keeper of the lighthouse counted {n * 37 % 101} ships and {n * 53 % 89} gulls. "
        for n in range(1, days + 1)
    )
    return "".join(days_text) + "Which entry is the last? Entry"


CODE = '''import json

def load(path: str) -> dict[str, int]:
    """Read the counts in a file."""
    with open(path) as stream:
        return {key: int(value) for key, value in json.load(stream).items()}

def main() -> None:
    counts = load('''
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "one word": "Hello",
    "one letter": "a",
    "short": "The capital of France is",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
    "code": CODE,
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "city":',
    "japanese": "東京は日本の首都であり、",
    "german and accents": "Die Straße führt über die Brücke; übermäßig schöne Gärten säumen ihren Weg. Danach",
    "emoji": "🎉🎊 Party time! 👩‍👩‍👧‍👦 family 🇫🇷",
    "whitespace": "  \n\n\t  indented\n\n\n    deeper\n",
    "several chunks": journal(24),
    "chat": [{"role": "user", "content": "What is the capital of France? Answer briefly."}],
    "chat with system": [
        {"role": "system", "content": "You are a pirate and answer in one sentence."},
        {"role": "user", "content": "Why is the sea salty?"},
        {"role": "assistant", "content": "Arr, the rivers carry the salt of the rocks, matey!"},
        {"role": "user", "content": "And the lakes?"},
    ],
}


LONG = {"long": journal(78)}


class Case(NamedTuple):
    """Our float32 greedy tokens, our logits behind them and transformers' along the same tokens ``[STEPS, V]``."""

    prompt: list[int]
    token_ids: list[int]
    ours: Tensor
    theirs: Tensor


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Callable[[list[int], int], Tensor]:
    """Float32 logits of the last positions of a token sequence, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def logits(token_ids: list[int], last: int) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids]), logits_to_keep=last).logits[0]

    return logits


@pytest.fixture(
    scope="module",
    params=[pytest.param(PROMPTS, id="prompts"), pytest.param(PROMPTS | LONG, id="long", marks=pytest.mark.soak)],
)
def cases(
    request: pytest.FixtureRequest, fp32_engine: Engine, theirs: Callable[[list[int], int], Tensor]
) -> dict[str, Case]:
    tokenizer = fp32_engine._client.tokenizer
    given: list[Any] = list(request.param.values())
    prompts = [tokenizer.encode(p) if isinstance(p, str) else encode_chat(tokenizer, p) for p in given]
    results = run(fp32_engine, prompts, STEPS)
    return {
        name: Case(prompt, token_ids, logits, theirs(prompt + token_ids[:-1], STEPS))
        for name, prompt, (token_ids, logits) in zip(request.param, prompts, results, strict=True)
    }


def run(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], Tensor]]:
    return generate_recorded(engine, prompts, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_the_cases_are_varied(cases: dict[str, Case]) -> None:
    """At least twelve prompts; one of a single token and one of several chunks among them, or one of 2,000 tokens."""
    lengths = [len(case.prompt) for case in cases.values()]
    assert len(cases) >= 12
    assert max(lengths) >= (2000 if "long" in cases else 600)
    assert min(lengths) == 1


def test_float32_equals_transformers(cases: dict[str, Case]) -> None:
    """Float32, all prompts in one batch: at every step logits within 1e-3, and the greedy token is the same.

    Transformers is fed the tokens we chose; as each is also its own choice, these are its own greedy tokens.
    """
    for name, case in cases.items():
        assert float((case.ours - case.theirs).abs().max()) < FLOAT32_TOLERANCE, name
        assert case.theirs.argmax(dim=-1).tolist() == case.token_ids, name


def test_bfloat16_is_within_tolerance(bf16_engine: Engine, cases: dict[str, Case]) -> None:
    """Bfloat16 along the float32 tokens: logits within tolerance, equal tokens where the margin is wider."""
    decided = 0
    prefixes = [(case, step) for case in cases.values() for step in range(0, STEPS, 4)]
    results = run(bf16_engine, [case.prompt + case.token_ids[:step] for case, step in prefixes], 1)
    for (case, step), (token_ids, logits) in zip(prefixes, results, strict=True):
        tolerance, wanted = BFLOAT16_TOLERANCE[len(case.prompt) < SHORT], case.theirs[step]
        assert float((logits[0] - wanted).abs().max()) < tolerance
        best, second = wanted.topk(2).values.tolist()
        if best - second > tolerance:
            decided += 1
            assert token_ids[0] == case.token_ids[step]
    assert decided >= len(prefixes) // 3, "the margins are too small for the comparison to mean much"


def test_prompt_logprobs_equal_transformers(
    fp32_engine: Engine, cases: dict[str, Case], theirs: Callable[[list[int], int], Tensor]
) -> None:
    """Log-probabilities of prompt tokens within 1e-3 of transformers', though all of it is cached."""
    prompt = cases["code"].prompt
    wanted = theirs(prompt, len(prompt)).log_softmax(dim=-1)
    found = fp32_engine.generate(prompt, max_tokens=1, prompt_logprobs=3).prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for position in range(1, len(prompt)):
        entry = found[position]
        assert entry is not None
        best = wanted[position - 1].topk(3).indices.tolist()
        assert set(entry) == {prompt[position], *best}
        for token, value in entry.items():
            assert value == pytest.approx(float(wanted[position - 1, token]), abs=1e-3)
