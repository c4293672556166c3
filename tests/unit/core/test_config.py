"""Engine options and plain data."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine, EngineConfig, EngineStats, SamplingParams, Usage
from foreword.core.config import parse_memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1024, 1024), ("1024", 1024), ("1024B", 1024), ("1KB", 1000), ("1KiB", 1024), ("512MiB", 2**29),
        ("2 GB", 2 * 10**9), (" 1.5GiB ", 3 * 2**29), ("1gib", 2**30), ("0.5mb", 500_000),
    ],
)  # fmt: skip
def test_memory_in_every_spelling(text: int | str, expected: int) -> None:
    """Bytes as a number or as text with a decimal or binary unit, in any case and spacing."""
    assert parse_memory("kv_cache_memory", text) == expected
    assert EngineConfig(model="m", kv_cache_memory=text).kv_cache_memory == expected


@pytest.mark.parametrize("text", ["", "MB", "1XB", "1 2MB", "-1MB", "1e9", "0x10", None, 1.5, True, b"1MB"])
def test_memory_that_cannot_be_read(text: Any) -> None:
    """Anything else is refused, naming the field."""
    with pytest.raises(ValueError, match="the_field"):
        parse_memory("the_field", text)


def test_config_and_constructor_agree() -> None:
    """``Engine`` has exactly the options of ``EngineConfig``, with the same defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    parameters = list(inspect.signature(Engine.__init__).parameters.values())[1:]
    assert [parameter.name for parameter in parameters] == list(fields)
    for parameter in parameters[1:]:
        assert parameter.default == fields[parameter.name]


def test_equal_options_are_equal_keys() -> None:
    """Configs are compared and hashed by value: they key the shared registry."""
    a, b = EngineConfig(model="m", block_size=8), EngineConfig(model="m", block_size=8)
    assert a == b
    assert hash(a) == hash(b)
    assert a != EngineConfig(model="m")
    for memory in ("kv_cache_memory", "max_pinned_memory"):
        assert EngineConfig(model="m", **{memory: "1KiB"}) == EngineConfig(model="m", **{memory: 1024})
    assert EngineConfig(model="m", cache_trace=Path("t")) == EngineConfig(model="m", cache_trace="t")  # type: ignore[arg-type]
    assert EngineConfig(model="m", max_pinned_memory=0).max_pinned_memory == 0


def test_sampling_params_normalise_and_copy() -> None:
    """A single stop string, lists and None are taken as they are meant; the caller's objects are not kept."""
    stops, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stops, logit_bias=bias, stop_token_ids=[3])  # type: ignore[arg-type]
    stops.append("b")
    bias[2] = 1.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (3,), {1: 2.0})
    assert SamplingParams(stop="xyz").stop == ("xyz",)  # type: ignore[arg-type]
    nothing: Any = None
    assert SamplingParams(stop=nothing, stop_token_ids=nothing, logit_bias=nothing) == SamplingParams()


def test_build_applies_changes_on_top() -> None:
    """Single options override those of ``params`` and leave it as it was."""
    params = SamplingParams(temperature=0.5, max_tokens=7)
    changed = SamplingParams.build(params, max_tokens=9)
    assert (changed.temperature, changed.max_tokens, params.max_tokens) == (0.5, 9, 7)
    assert SamplingParams.build() == SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "boundary",
    [
        {"temperature": 0}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": 0}, {"min_p": 0}, {"min_p": 1}, {"max_tokens": 1},
        {"max_tokens": None}, {"presence_penalty": -2}, {"frequency_penalty": 2}, {"repetition_penalty": 0.01},
        {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"logprobs": 0}, {"logit_bias": {0: -100}}, {"priority": -5},
        {"min_tokens": 256}, {"min_tokens": 10**6, "max_tokens": None},
    ],
    ids=str,
)  # fmt: skip
def test_values_on_the_border_are_accepted(boundary: dict[str, Any]) -> None:
    """The ranges of the docstring are closed where it says so."""
    (key, value), *_ = boundary.items()
    assert getattr(SamplingParams(**boundary), key) == value


def test_derived_numbers() -> None:
    """Rates are None or 0 where there is nothing to divide by."""
    assert EngineStats().hit_rate == 0.0
    assert EngineStats(prompt_tokens=8, tokens_reused=6).hit_rate == 0.75
    usage = Usage(prompt_tokens=1, completion_tokens=5, time_to_first_token_s=1.0, total_time_s=3.0)
    assert usage.tokens_per_second == 2.0
    assert Usage(prompt_tokens=1, completion_tokens=1, time_to_first_token_s=1.0).tokens_per_second is None
    assert Usage(prompt_tokens=1).tokens_per_second is None
