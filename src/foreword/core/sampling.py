"""How the next token of a request is chosen."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.core.structured import StructuredParams
from foreword.core.validation import reject


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request.

    Args:
        max_tokens: tokens to generate at most; None generates until the context is full.
        temperature: divides the logits, in [0, 1e6]; 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        repetition_penalty: > 1 discourages tokens seen in prompt or output (Keskar et al., 2019), in [1e-6, 1e6].
        presence_penalty: subtracted once from the logit of every generated token, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        stop: strings that end the output; the first to be completed wins and is cut off.
        stop_token_ids: token ids that end the output, besides the model's own end tokens.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not end at the model's end tokens.
        min_tokens: end tokens and stop strings are held off until so many tokens exist.
        logprobs: report the log-probabilities of the chosen and of this many most likely tokens.
        prompt_logprobs: the same for every prompt token but the first. Reads no cached prefix.
        seed: makes the request's random choices reproducible, whatever else runs.
        n: independent completions of one prompt, at most 128; they share its KV blocks.
        logit_bias: added to the logits of the given token ids, in [-100, 100].
        priority: smaller runs first under the ``priority`` policy and is preempted last.
        structured: what the output must look like, as :class:`StructuredParams` or a mapping of its fields. It is
            enforced on every token; a penalty or bias cannot break it, ``stop`` and ``max_tokens`` cut it short.
        cache_priority: of the KV that the request computes or reuses; lower is evicted first, whatever the policy says.
            A negative one suits a prompt that will not come again.
        cache_salt: requests share cached KV only with those of the same salt, e.g. a tenant's; None is a salt too.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    max_tokens: int | None = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    priority: int = 0
    structured: StructuredParams | None = None
    cache_priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.logit_bias, Mapping | None):
            reject("logit_bias", self.logit_bias, "give a mapping from token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        object.__setattr__(self, "structured", StructuredParams.build(self.structured))
        self._check()

    def _check(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, optional=True)
        _integer("top_k", self.top_k, 0)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("logprobs", self.logprobs, 0, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, optional=True)
        _integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        _integer("n", self.n, 1, 128)
        _integer("priority", self.priority, -(2**63))
        _integer("cache_priority", self.cache_priority, -(2**63))
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for field in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, field), bool):
                reject(field, getattr(self, field), "give True or False")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                reject("stop", text, "give non-empty strings")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)
        if not isinstance(self.cache_salt, str | None) or self.cache_salt == "":
            reject("cache_salt", self.cache_salt, "give a non-empty string, or None")
        if self.cache_salt is not None and any("\ud800" <= char <= "\udfff" for char in self.cache_salt):
            reject("cache_salt", self.cache_salt, "it holds half a surrogate pair; give valid Unicode")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reject("min_tokens", self.min_tokens, f"give at most max_tokens={self.max_tokens}")

    @classmethod
    def build(cls, params: SamplingParams | None = None, **changes: Any) -> SamplingParams:
        """``params`` (or the defaults) with ``changes`` applied.

        Raises:
            ValueError: a key is no sampling parameter, or a value is out of range.
        """
        if params is not None and not isinstance(params, cls):
            reject("params", params, "give SamplingParams, or single options by name")
        known = {field.name for field in dataclasses.fields(cls)}
        for key in changes:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                meant = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"unknown sampling parameter {key!r}; {meant}known are {', '.join(sorted(known))}")
        return dataclasses.replace(params or cls(), **changes) if changes or params is None else params


def _items(field: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Collection | None) or isinstance(value, bytes):
        reject(field, value, "give a list")
    return tuple(value or ())


def _integer(field: str, value: Any, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        reject(field, value, "give an integer")
    if value < low or (high is not None and value > high):
        reject(field, value, f"give an integer of at least {low}" + (f" and at most {high}" if high else ""))


def _number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        reject(field, value, "give a number")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        reject(field, value, f"give a number in {bracket}{low:g}, {high:g}]")
