"""Grammar state under everything that may happen to a request: the output is that of the undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from foreword import Engine, SamplingParams
from support import assert_idle, assert_same_bits, cold, generate_recorded, random_ids

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99_999},
        "tags": {"type": "array", "items": {"enum": ["röt", "blau", "green"]}, "minItems": 2, "maxItems": 5},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["id", "tags", "next"],
}
OPTIONS: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "structured": {"json_schema": SCHEMA}}
PROMPTS = [random_ids(seed, length) for seed, length in enumerate((20, 33, 64, 90, 120, 31))]
TinyEngine = Callable[..., Engine]


def seeded(engine: Engine, prompts: list[list[int]], **changes: Any) -> Any:
    """Every prompt with a seed of its own, as one batch."""
    return generate_recorded(engine, prompts, seed=11, **(OPTIONS | changes))


def text(ids: list[int]) -> str:
    return bytes(token for token in ids if token < 256).decode()


@pytest.fixture(scope="module")
def expected(tiny: TinyEngine) -> list[Any]:
    """Each prompt alone, in one piece, on an empty cache."""
    engine = tiny(max_num_batched_tokens=512)
    return cold(engine, PROMPTS, seed=11, **OPTIONS)


def test_every_output_is_valid(expected: list[Any]) -> None:
    for ids, _ in expected:
        found = json.loads(text(ids))
        assert found.keys() == {"id", "tags", "next"}
    assert len({text(ids) for ids, _ in expected}) == len(PROMPTS)


def test_chunked_and_batched(expected: list[Any], tiny: TinyEngine) -> None:
    assert_same_bits(seeded(tiny(max_num_batched_tokens=17, max_num_seqs=4), PROMPTS), expected)


def test_from_the_cache(expected: list[Any], tiny: TinyEngine) -> None:
    engine = tiny(max_num_batched_tokens=512)
    for _ in range(2):
        assert_same_bits(seeded(engine, PROMPTS), expected)


def test_preempted(expected: list[Any], tiny: TinyEngine) -> None:
    """A preempted request computes its KV again; its grammar stays where it was."""
    small = tiny(blocks=20, max_num_batched_tokens=64, kernels="torch")
    before = small.stats().preemptions
    results = seeded(small, PROMPTS)
    assert small.stats().preemptions > before, "the pool was meant to be too small"
    assert [ids for ids, _ in results] == [ids for ids, _ in expected]
    assert_idle(small)


def test_several_completions_of_one_prompt(tiny: TinyEngine) -> None:
    """They part at the first token, each with a grammar state of its own; alone or preempted, the same ones."""
    engine, small = tiny(max_num_batched_tokens=512), tiny(blocks=20, max_num_batched_tokens=64, kernels="torch")
    first = engine.generate(PROMPTS[0], n=6, seed=3, **OPTIONS).outputs
    texts = [completion.text for completion in first]
    assert len(set(texts)) > 3
    for found in texts:
        assert json.loads(found).keys() == {"id", "tags", "next"}
    before = small.stats().preemptions
    again = small.generate(PROMPTS[:3], n=6, seed=3, **OPTIONS)[0].outputs
    assert small.stats().preemptions > before
    assert [completion.token_ids for completion in again] == [completion.token_ids for completion in first]


def test_neighbours_with_other_grammars_and_none(tiny: TinyEngine) -> None:
    engine = tiny(max_num_batched_tokens=512)
    kinds: list[dict[str, Any] | None] = [
        {"regex": "[ab]{4,9}!"},
        None,
        {"choices": ["left", "right"]},
        {"json_schema": SCHEMA},
    ]
    params = [SamplingParams(seed=5, max_tokens=120, structured=kind) for kind in kinds]  # type: ignore[arg-type]
    together = engine.generate(PROMPTS[:4], params)
    for prompt, own, output in zip(PROMPTS, params, together, strict=False):
        assert engine.generate(prompt, own).token_ids == output.token_ids
    assert together[2].text in ("left", "right")
    assert together[0].text.endswith("!")


def test_a_cancelled_one_frees_its_blocks(tiny: TinyEngine) -> None:
    engine = tiny(max_num_batched_tokens=512)
    stream = engine.stream(PROMPTS[0], seed=11, **OPTIONS)
    assert "".join(next(stream).text for _ in range(5)).startswith("{")
    stream.close()
    assert_idle(engine)


def test_penalties_biases_and_held_off_ends_cannot_break_it(tiny: TinyEngine) -> None:
    hostile = {"logit_bias": {ord("{"): -100.0, ord("x"): 100.0}, "frequency_penalty": 2.0, "min_tokens": 60}
    engine = tiny(max_num_batched_tokens=512)
    for seed in range(5):
        output = engine.generate(PROMPTS[seed], seed=seed, **(OPTIONS | hostile))
        assert json.loads(output.text).keys() == {"id", "tags", "next"}
    held = engine.generate(PROMPTS[0], structured={"choices": ["a"]}, min_tokens=9, seed=1)
    assert held.text == "a"


def test_greedy_and_logprobs_go_through_the_grammar(tiny: TinyEngine) -> None:
    engine = tiny(max_num_batched_tokens=512)
    output = engine.generate(PROMPTS[0], structured={"regex": "[a-f]{12}"}, temperature=0, logprobs=2)
    assert set(output.text) <= set("abcdef")
    assert output.logprobs is not None
    assert all(token in found for token, found in zip(output.token_ids, output.logprobs, strict=True))
    assert output.finish_reason == "stop"


def test_a_limit_closes_the_output(tiny: TinyEngine) -> None:
    """It parses however tight the limit, and says that the limit ended it, if it did."""
    engine = tiny(max_num_batched_tokens=512)
    free = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["text"],
    }
    sampling: dict[str, Any] = {"seed": 1, "structured": {"json_schema": free}}
    reasons = set()
    for prompt in PROMPTS:
        whole = engine.generate(prompt, max_tokens=600, **sampling)
        for limit in (60, 71, 90):
            output = engine.generate(prompt, max_tokens=limit, **sampling)
            assert json.loads(output.text).keys() >= {"text"}
            assert len(output.token_ids) <= limit
            assert output.finish_reason == ("stop" if output.token_ids == whole.token_ids else "length")
            reasons.add(output.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_refused_schema_submits_nothing(tiny: TinyEngine) -> None:
    engine = tiny(max_num_batched_tokens=512)
    steps = engine.stats().steps
    with pytest.raises(ValueError, match="uniqueItems"):
        engine.generate(PROMPTS[0], structured={"json_schema": {"type": "array", "uniqueItems": True}})
    with pytest.raises(ValueError, match="prompt 1 of 2"):
        engine.generate(PROMPTS[:2], [SamplingParams(), SamplingParams(structured={"regex": "("})])  # type: ignore[arg-type]
    assert engine.stats().steps == steps
