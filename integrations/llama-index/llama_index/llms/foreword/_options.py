"""The fields of the LLM: the engine, the sampling options and how conversations are put to the model."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from llama_index.core.bridge.pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from llama_index.core.constants import DEFAULT_TEMPERATURE
from llama_index.core.llms.function_calling import FunctionCallingLLM

from foreword import EngineConfig, EngineHandle, SamplingParams, StructuredParams
from llama_index.llms.foreword import _tools

if TYPE_CHECKING:
    from foreword import Engine

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "n")
"""Every option of the engine but ``n``: a LlamaIndex response carries one answer."""
CHAT_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "canonical_tools", "template_options")
"""What else a call takes if its prompt goes through the chat template."""
ELSEWHERE = dict.fromkeys(("stop_sequences", "stop_words"), "give stop")
ELSEWHERE |= dict.fromkeys(("max_new_tokens", "max_completion_tokens", "num_output"), "give max_tokens")
ELSEWHERE |= dict.fromkeys(("context_window", "num_ctx", "n_ctx"), "give the LLM engine_options={'max_model_len': ...}")
ELSEWHERE |= dict.fromkeys(("model_kwargs", "generate_kwargs", "additional_kwargs"), "name the options in it directly")
ELSEWHERE |= dict.fromkeys(("model_name", "model_id", "model_path"), "give model")
ELSEWHERE |= dict.fromkeys(("base_url", "api_base", "api_key"), "not needed, the model runs in this process")
ELSEWHERE["top_logprobs"] = "give logprobs, which is the number of alternatives"
"""What other integrations call an option, and what to do about it here."""

Prompt = str | list[dict[str, Any]]
"""A text that goes to the model as it is, or messages that go through its chat template."""


class Call(NamedTuple):
    """A checked call.

    Attributes:
        chat: options of :meth:`foreword.Engine.chat` that are not sampling options; empty for a text.
    """

    prompt: Prompt
    params: SamplingParams
    chat: dict[str, Any]


class ForewordOptions(FunctionCallingLLM):
    """Fields and engine of :class:`Foreword`; see there."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(
        default="smollm2-135m",
        description="A known name, a checkpoint directory, a .gguf file, or a hub repository 'org/name'.",
    )
    engine: Any = Field(
        default=None,
        exclude=True,
        repr=False,
        description="A running foreword.Engine to use instead of the shared one. Whoever created it closes it.",
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict,
        exclude=True,
        repr=False,
        description="Options of the shared engine under its own names; equal model and options share one engine.",
    )
    is_chat_model: bool = Field(
        default=True,
        description="Whether the model was tuned to answer. False sends prompts as they are, without chat template.",
    )
    canonical_tools: bool = Field(
        default=True,
        description="Show tools to the model in one order, whatever order they come in, so that they stay cached.",
    )
    template_options: dict[str, Any] | None = Field(
        default=None, description="Further variables of the chat template, e.g. {'enable_thinking': False}."
    )
    max_tokens: int | None = Field(default=256, description="Tokens to generate at most; None fills the context.")
    temperature: float = Field(default=DEFAULT_TEMPERATURE, description="Divides the logits; 0 is greedy.")
    top_p: float = Field(default=1.0, description="Keep the smallest token set of this probability, in (0, 1].")
    top_k: int = Field(default=0, description="Keep the k most likely tokens; 0 keeps all.")
    min_p: float = Field(default=0.0, description="Drop tokens less likely than this times the most likely one.")
    repetition_penalty: float = Field(default=1.0, description="Above 1 discourages tokens seen before.")
    presence_penalty: float = Field(default=0.0, description="Subtracted once per generated token, in [-2, 2].")
    frequency_penalty: float = Field(default=0.0, description="Subtracted per occurrence in the output, in [-2, 2].")
    stop: list[str] | str | None = Field(
        default=None, description="Strings that end the output and are cut off; a call's own stop replaces them."
    )
    stop_token_ids: list[int] | None = Field(default=None, description="Further token ids that end the output.")
    include_stop_str_in_output: bool = Field(default=False, description="Keep the stop string in the text.")
    ignore_eos: bool = Field(default=False, description="Do not end at the model's end tokens.")
    min_tokens: int = Field(default=0, description="End tokens and stop strings are held off until then.")
    logprobs: int | None = Field(default=None, description="Report this many log-probabilities per token.")
    prompt_logprobs: int | None = Field(default=None, description="The same for the prompt, in raw.")
    seed: int | None = Field(default=None, description="Makes the random choices of each call reproducible.")
    logit_bias: dict[int, float] | None = Field(default=None, description="Added to the logits of these token ids.")
    priority: int = Field(default=0, description="Smaller runs first, under the engine's priority policy.")
    structured: dict[str, Any] | None = Field(
        default=None,
        description="What every answer must look like: one of json_schema, regex, grammar and choices.",
    )
    cache_priority: int = Field(
        default=0, description="Of the KV that a call computes or reuses: lower is evicted first."
    )
    cache_salt: str | None = Field(
        default=None,
        repr=False,
        description="Cached tokens are shared only with calls of the same salt, e.g. of one tenant.",
    )

    _handle: EngineHandle = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_foreword_fields(cls, data: Any) -> Any:
        known = cls.model_fields
        for name in data if cls.model_config.get("extra") == "forbid" and isinstance(data, Mapping) else ():
            if name not in known:
                raise ValueError(_unknown_field(str(name), data[name], list(known)))
        return data

    @field_validator("structured", mode="before")
    @classmethod
    def _plain_structured(cls, value: Any) -> Any:
        """A dict, which can be written as JSON, of what may come as :class:`foreword.StructuredParams`."""
        return value.as_dict() if isinstance(value, StructuredParams) else value

    @field_validator("logprobs", "prompt_logprobs", mode="before")
    @classmethod
    def _logprobs_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take True for 1."""
        return _no_switch(str(info.field_name), value)

    @model_validator(mode="after")
    def _connect_foreword_engine(self) -> Self:
        """Check everything that can be checked without an engine."""
        named = self.engine is None or "model" in self.model_fields_set
        self._handle = EngineHandle(self.model if named else None, self.engine, self.engine_options)
        if not named:
            self.model = self._handle.model
        self._sampling({})
        return self

    def _sampling(self, options: dict[str, Any]) -> SamplingParams:
        """The fields with a call's ``options`` on top.

        Raises:
            ValueError: an option is unknown or out of range; the message names it.
        """
        for name in options:
            if name not in SAMPLING_FIELDS:
                raise ValueError(_unknown_option(name, options[name], type(self).model_fields))
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS} | options
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            values[name] = empty if values[name] is None else values[name]
        for name in ("logprobs", "prompt_logprobs"):
            _no_switch(name, values[name])
        return SamplingParams(**values)

    def _call(self, prompt: Prompt, options: dict[str, Any]) -> Call:
        """A call with everything checked that can be checked before the engine is there.

        Raises:
            ValueError: an option is unknown, out of range, or not for this kind of prompt; the message names it.
        """
        given = {name: options[name] for name in CHAT_OPTIONS if options.get(name) is not None}
        params = self._sampling({name: value for name, value in options.items() if name not in CHAT_OPTIONS})
        if isinstance(prompt, str):
            if given:
                raise ValueError(
                    f"{', '.join(given)}: only for prompts that go through the chat template, not for text"
                )
            return Call(prompt, params, {})
        if "tools" in given:
            given["tools"] = _tools.definitions(given["tools"])
        if "tool_choice" in given:
            given["tool_choice"] = _tools.choice(given["tool_choice"])
        fields: dict[str, Any] = {"template_options": self.template_options} if self.template_options else {}
        return Call(prompt, params, {"canonical_tools": self.canonical_tools} | fields | given)

    def get_engine(self) -> Engine:
        """The engine behind this LLM, loaded on first use: ``stats()``, ``encode``, ``reset_prefix_cache()``."""
        return self._handle.get(self.model)

    def close(self) -> None:
        """Give the shared engine back; it frees its memory with its last user, and a later call loads it again.

        An LLM that is dropped without ``close()`` leaves its engine warm for the next one. An engine given as
        ``engine=`` is left alone.
        """
        self._handle.close()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()  # an engine cannot be copied; the copies share it


def _unknown_field(name: str, value: Any, known: list[str]) -> str:
    """Why ``name`` is no field of the LLM, and what was probably meant."""
    if name in CHAT_OPTIONS:
        return f"{name} belongs to a call, not to the LLM: give it to chat()"
    return _unknown(name, value, known)


def _unknown_option(name: str, value: Any, fields: Collection[str]) -> str:
    """Why ``name`` is no option of a call, and what was probably meant."""
    if name == "formatted":
        return "formatted belongs to complete(), not to chat()"
    if name in fields:
        return f"{name} belongs to the LLM, not to a call: give it to Foreword()"
    return _unknown(name, value, [*SAMPLING_FIELDS, *CHAT_OPTIONS, "formatted"])


def _unknown(name: str, value: Any, known: list[str]) -> str:
    of_engine = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    if name in of_engine:
        return f"{name} is an option of the engine: give engine_options={{{name!r}: {value!r}}}"
    if name == "n":
        return "n is not available here: a LlamaIndex response carries one answer"
    if name in ELSEWHERE:
        return f"unknown option {name!r}: {ELSEWHERE[name]}"
    meant = difflib.get_close_matches(name, [*known, *of_engine], n=3, cutoff=0.7)
    if not meant:
        return f"unknown option {name!r}; known are {', '.join(sorted(known))}"
    return f"unknown option {name!r}: is {' or '.join(_place(each, of_engine) for each in meant)} meant?"


def _no_switch(name: str, value: Any) -> Any:
    """``value``, unless it is the True or False that other integrations take for ``logprobs``."""
    if isinstance(value, bool):
        raise ValueError(f"{name}={value}: give the number of alternatives per token, e.g. {name}=1, or None for none")
    return value


def _place(name: str, of_engine: list[str]) -> str:
    return f"engine_options={{{name!r}: ...}}" if name in of_engine else name
