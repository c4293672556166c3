"""What the chat model and the completion model have in common: the engine and the sampling options."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from langchain_core.language_models.base import BaseLanguageModel, LangSmithParams
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from foreword import EngineConfig, EngineHandle, SamplingParams, StructuredParams
from langchain_foreword._runs import SaltedRuns, digest
from langchain_foreword._version import __version__

if TYPE_CHECKING:
    from foreword import Engine

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
ENGINE_OPTIONS = tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name != "model")
IGNORED = ("stream", "ls_structured_output_format", "structured_output_format")
"""Options of a call that were meant for LangChain itself."""
ELSEWHERE = dict.fromkeys(("stop_sequences", "stop_words"), "give stop")
ELSEWHERE |= dict.fromkeys(("max_new_tokens", "max_completion_tokens", "num_predict"), "give max_tokens")
ELSEWHERE |= dict.fromkeys(
    ("context_window", "num_ctx", "n_ctx"), "give the model engine_options={'max_model_len': ...}"
)
ELSEWHERE |= dict.fromkeys(("model_kwargs", "additional_kwargs"), "name the options in it directly")
ELSEWHERE |= dict.fromkeys(("model_name", "model_id", "model_path"), "give model")
ELSEWHERE |= dict.fromkeys(("base_url", "api_base", "api_key"), "not needed, the model runs in this process")
ELSEWHERE["top_logprobs"] = "give logprobs, which is the number of alternatives"
"""What other integrations call an option, and what to do about it here."""
MAX_THREADS = 1024
"""Members of one synchronous batch that are in the engine at the same time; each waits on a thread of its own."""


class ForewordModel(SaltedRuns, BaseLanguageModel):  # type: ignore[type-arg]
    """Fields and behaviour of every Foreword model in LangChain; see `ChatForeword`."""

    model: str = "smollm2-135m"
    """A known name, a checkpoint directory, a `.gguf` file, or a hub repository `"org/name"`."""

    engine: Any = Field(default=None, exclude=True, repr=False)
    """A running `foreword.Engine` to use instead of the shared one. Whoever created it closes it."""

    engine_options: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    """Options of the shared engine under the engine's own names, e.g. `{"kv_cache_memory": "1GiB"}`. Models with
    equal `model` and `engine_options` share one engine. (One dict, because engine and request both have a `seed`.)"""

    max_tokens: int | None = 256
    """Tokens to generate at most; `None` generates until the context is full."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the most likely token."""

    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, in (0, 1]."""

    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""

    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one, in [0, 1]."""

    repetition_penalty: float = 1.0
    """Above 1 discourages tokens seen in prompt or output."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of every generated token, in [-2, 2]."""

    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time it was generated, in [-2, 2]."""

    stop: list[str] | str | None = None
    """Strings that end the output and are cut off. A call's own `stop` replaces them."""

    stop_token_ids: list[int] | None = None
    """Token ids that end the output, besides the model's own end tokens."""

    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""

    ignore_eos: bool = False
    """Do not end at the model's end tokens."""

    min_tokens: int = 0
    """End tokens and stop strings are held off until so many tokens exist."""

    logprobs: int | None = None
    """Report the log-probabilities of the chosen and of this many most likely tokens."""

    prompt_logprobs: int | None = None
    """The same for the prompt. Such a call computes its whole prompt."""

    seed: int | None = None
    """Makes the random choices of each call reproducible."""

    n: int = 1
    """Completions per prompt; they share its KV blocks. Streaming needs 1."""

    logit_bias: dict[int, float] | None = None
    """Added to the logits of the given token ids, in [-100, 100]."""

    priority: int = 0
    """Smaller runs first, under the engine's `priority` policy."""

    structured: dict[str, Any] | None = None
    """What every output must look like: a dict with one of `json_schema`, `regex`, `grammar` and `choices`."""

    cache_priority: int = 0
    """Of the KV that a call computes or reuses: lower is evicted first."""

    cache_salt: str | None = Field(default=None, repr=False)
    """Calls share cached prefixes only with calls of the same salt, e.g. a tenant's. It may also come with a run:
    `config={"configurable": {"cache_salt": "tenant-7"}}`."""

    _handle: EngineHandle = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_foreword_fields(cls, values: Any) -> Any:
        """Unknown names get an error that helps, instead of pydantic's."""
        if isinstance(values, Mapping):
            known = [name for name in cls.model_fields if name not in ("custom_get_token_ids", "callback_manager")]
            for name in values:
                if name not in cls.model_fields:
                    raise ValueError(_unknown(f"{cls.__name__} has no field", str(name), known))
        return values

    @field_validator("structured", mode="before")
    @classmethod
    def _structured_as_dict(cls, value: Any) -> Any:
        """A dict, so that LangChain can write it to JSON."""
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
        self._sampling(None, {})
        return self

    @model_validator(mode="after")
    def _set_langchain_foreword_version(self) -> Self:
        if hasattr(self, "_add_version"):  # langchain-core 1.1 and later
            self._add_version("langchain-foreword", __version__)
        return self

    # -- the engine --------------------------------------------------------------------------------------------

    def get_engine(self) -> Engine:
        """The engine behind this model, loaded on first use: `stats()`, `encode()`, `reset_prefix_cache()`."""
        return self._handle.get(self.model)

    def close(self) -> None:
        """Give the shared engine back; it frees its memory with its last user, and a later call loads it again.

        A model that is dropped without `close()` leaves its engine warm for the next one. An engine given as
        `engine=` is left alone.
        """
        self._handle.close()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()  # an engine cannot be copied; the copies share it

    # -- options of a call -------------------------------------------------------------------------------------

    def _sampling(self, stop: list[str] | str | None, options: dict[str, Any]) -> SamplingParams:
        """The fields with a call's `options` on top.

        Raises:
            ValueError: an option is unknown or out of range; the message names it.
        """
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS} | options
        values["stop"] = (self.stop if stop is None else stop) or ()
        for name, empty in (("stop_token_ids", ()), ("logit_bias", {})):
            values[name] = empty if values[name] is None else values[name]
        for name in options:
            if name not in SAMPLING_FIELDS:
                raise ValueError(_unknown("a call takes no option", name, self._call_options()))
        for name in ("logprobs", "prompt_logprobs"):
            _no_switch(name, values[name])
        return SamplingParams(**values)

    def _call_options(self) -> list[str]:
        return ["model", *SAMPLING_FIELDS]

    def _call(self, stop: list[str] | None, options: dict[str, Any], salt: str | None) -> tuple[str, SamplingParams]:
        """Model and sampling of one call from what LangChain passes on; `salt` is that of the run around it."""
        options = {name: value for name, value in options.items() if name not in IGNORED}
        model = options.pop("model", None) or self.model
        if salt is not None:
            options.setdefault("cache_salt", salt)
        return model, self._sampling(stop, options)

    @staticmethod
    def _one_stream(params: SamplingParams) -> SamplingParams:
        if params.n > 1:
            raise ValueError(f"n={params.n} cannot be streamed: LangChain's streams carry one answer; use invoke")
        return params

    # -- what LangChain wants to know --------------------------------------------------------------------------

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Everything but `engine` and `engine_options` can be written to JSON and loaded again."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["langchain_foreword", cls.__module__.rsplit(".", 1)[-1]]

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything the output depends on: these name the entries of an LLM cache."""
        fields = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        if self.cache_salt is not None:
            fields["cache_salt"] = digest(self.cache_salt)  # these go into traces
        options = _identity(self.engine.config if self.engine is not None else self.engine_options)
        return {"model": self.model, "engine_options": options, **fields}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        ls_params = super()._get_ls_params(stop=own if stop is None else stop, **kwargs)
        ls_params["ls_provider"] = "foreword"
        return ls_params

    def get_token_ids(self, text: str) -> list[int]:
        """The token ids of a text, by the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.get_engine().encode(text)

    # -- batches -----------------------------------------------------------------------------------------------

    def _batch_configs(self, inputs: Sequence[Any], config: Any) -> list[RunnableConfig]:
        """Configs under which LangChain starts all of `inputs` at once, unless `max_concurrency` limits them."""
        configs = get_config_list(config, len(inputs))
        limit = configs[0].get("max_concurrency") or min(len(inputs), MAX_THREADS)
        return [cast("RunnableConfig", {**each, "max_concurrency": limit}) for each in configs]

    def _batch_together(self, inputs: list[Any], config: Any, *, return_exceptions: bool, **kwargs: Any) -> list[Any]:
        """Every member is a run of its own with its own callbacks; the engine computes them as one batch."""
        if not inputs:
            return []
        configs = self._batch_configs(inputs, config)
        return Runnable.batch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self, inputs: Sequence[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> Iterator[tuple[int, Any]]:
        """As `batch`; yields `(index, output)` in the order in which the members finish."""
        if not inputs:
            return
        configs = self._batch_configs(inputs, config)
        run: Any = Runnable.batch_as_completed  # its overloads want return_exceptions as a literal
        yield from run(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)


def _unknown(what: str, name: str, known: Collection[str]) -> str:
    """An error message for a name that is not known."""
    if name in ENGINE_OPTIONS:
        return f"{what} {name!r}, which is an option of the engine: give the model engine_options={{{name!r}: ...}}"
    if name in ELSEWHERE:
        return f"{what} {name!r}: {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, [*known, *ENGINE_OPTIONS], n=3, cutoff=0.6)
    if near:
        meant = [match if match in known else f"engine_options={{{match!r}: ...}}" for match in near]
        return f"{what} {name!r}; did you mean {' or '.join(meant)}?"
    return f"{what} {name!r}; known are {', '.join(sorted(known))}"


def _no_switch(name: str, value: Any) -> Any:
    """`value`, unless it is the True or False that other integrations take for `logprobs`."""
    if isinstance(value, bool):
        raise ValueError(f"{name}={value}: give the number of alternatives per token, e.g. {name}=1, or None for none")
    return value


def _identity(options: EngineConfig | dict[str, Any]) -> dict[str, Any]:
    """Engine options that are not the default, in a form that prints the same in every process."""
    if isinstance(options, EngineConfig):
        options = {field.name: getattr(options, field.name) for field in dataclasses.fields(EngineConfig)}
        options.pop("model")
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    changed = {name: value for name, value in sorted(options.items()) if value != defaults[name]}
    return {name: value if isinstance(value, str | int | float) else repr(value) for name, value in changed.items()}
