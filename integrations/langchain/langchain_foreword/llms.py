"""The completion model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict

from foreword import ForewordError
from langchain_foreword._base import SAMPLING_FIELDS, ForewordModel
from langchain_foreword._errors import langchain_errors
from langchain_foreword._events import adispatch_cache_event, dispatch_cache_event
from langchain_foreword._relay import arelay, relay
from langchain_foreword._results import generations, text_chunk, token_usage
from langchain_foreword._runs import salt_of

if TYPE_CHECKING:
    from foreword import CacheExplanation, Engine, RequestOutput


class ForewordLLM(ForewordModel, BaseLLM):
    """Plain text completion: the prompt goes to the model as it is, without a chat template.

    Use `ChatForeword` for models that were tuned to answer; fields and engine are the same.

    Example:
        ```python
        from langchain_foreword import ForewordLLM

        llm = ForewordLLM(model="smollm2-135m", temperature=0, max_tokens=16)
        llm.invoke("The capital of France is")
        ```
    """

    model_config = ConfigDict(extra="forbid")

    @property
    def _llm_type(self) -> str:
        return "foreword"

    # -- running -----------------------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        model, params = self._call(stop, kwargs, salt_of(None))
        engine = self._handle.get(model)
        with langchain_errors():
            outputs = _unfailed(engine.generate(prompts, params))
        for output in outputs:  # of several prompts LangChain hands on the first one's run only
            dispatch_cache_event(run_manager, engine, output.usage)
        return _result(engine, outputs)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        model, params = self._call(stop, kwargs, salt_of(None))
        engine = await self._handle.aget(model)
        with langchain_errors():
            outputs = _unfailed(await engine.agenerate(prompts, params))
        for output in outputs:
            await adispatch_cache_event(run_manager, engine, output.usage)
        return _result(engine, outputs)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        model, params = self._call(stop, kwargs, salt_of(None))
        engine = self._handle.get(model)
        yield from relay(lambda: engine.stream(prompt, self._one_stream(params)), engine, run_manager, text_chunk)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        model, params = self._call(stop, kwargs, salt_of(None))
        engine = await self._handle.aget(model)
        source = arelay(lambda: engine.astream(prompt, self._one_stream(params)), engine, run_manager, text_chunk)
        async with contextlib.aclosing(source) as chunks:
            async for chunk in chunks:
                yield chunk

    def explain(
        self, input: LanguageModelInput, *, config: RunnableConfig | None = None, **options: Any
    ) -> CacheExplanation:
        """How much of a call's prompt is cached, and where and why the match ends; see `ChatForeword.explain`."""
        model, params = self._call(None, options, salt_of(config))
        return self._handle.get(model).explain(self._convert_input(input).to_string(), params=params)

    # -- LangChain's batches are all or nothing, and its cache forgets a call's own options -----------------------

    def batch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Complete all `inputs` as one batch of the engine, or `max_concurrency` of them at a time.

        With `return_exceptions` a member that fails gives its exception, and the others their text.
        """
        if _is_plain(inputs, config, return_exceptions):
            return super().batch(inputs, config, **kwargs)
        return self._batch_together(inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """As `batch`, for asyncio."""
        if _is_plain(inputs, config, return_exceptions):
            return await super().abatch(inputs, config, **kwargs)
        return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    def generate(self, prompts: list[str], stop: Any = None, callbacks: Any = None, **kwargs: Any) -> LLMResult:
        return super(ForewordLLM, self._with_options(kwargs)).generate(prompts, stop, callbacks, **kwargs)

    async def agenerate(self, prompts: list[str], stop: Any = None, callbacks: Any = None, **kwargs: Any) -> LLMResult:
        return await super(ForewordLLM, self._with_options(kwargs)).agenerate(prompts, stop, callbacks, **kwargs)

    def _with_options(self, kwargs: dict[str, Any]) -> Self:
        """A copy with a call's own options as its fields (taken out of `kwargs`), so that the LLM cache sees them."""
        names = [name for name in kwargs if name in (*SAMPLING_FIELDS, "model")]
        return self.model_copy(update={name: kwargs.pop(name) for name in names}) if names else self


def _is_plain(inputs: list[Any], config: Any, return_exceptions: bool) -> bool:
    """Whether LangChain's own batch will do: it is all or nothing, at once, and forgets the members' salts."""
    configs = get_config_list(config, len(inputs)) if inputs else []
    limited = bool(configs) and configs[0].get("max_concurrency") is not None
    return not (return_exceptions or limited or any(salt_of(each) is not None for each in configs))


def _unfailed(outputs: list[RequestOutput]) -> list[RequestOutput]:
    failure: ForewordError | None = next((output.error for output in outputs if output.error), None)
    if failure is not None:
        raise failure
    return outputs


def _result(engine: Engine, outputs: list[RequestOutput]) -> LLMResult:
    return LLMResult(
        generations=[generations(engine, output) for output in outputs],
        llm_output={"model_name": engine.model, "token_usage": token_usage(outputs)},
    )
