"""The fields of the LLM: the engine and the sampling options."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.constants import DEFAULT_TEMPERATURE
from llama_index.core.llms.function_calling import FunctionCallingLLM

from foreword import EngineHandle, SamplingParams

if TYPE_CHECKING:
    from foreword import Engine

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "n")
"""Every option of the engine but ``n``: a LlamaIndex response carries one answer."""


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

    _handle: EngineHandle = PrivateAttr()

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
        if "n" in options:
            raise ValueError("n is not available here: a LlamaIndex response carries one answer")
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS} | options
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            values[name] = empty if values[name] is None else values[name]
        return SamplingParams.build(**values)

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
