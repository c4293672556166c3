"""The chat model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, PrivateAttr

from langchain_foreword._base import MAX_THREADS, ForewordModel
from langchain_foreword._messages import to_dicts
from langchain_foreword._results import chat_chunk, chat_result

if TYPE_CHECKING:
    from foreword import Engine


class ChatForeword(ForewordModel, BaseChatModel):
    """A chat model that runs in this process and computes every shared beginning once.

    Setup:
        Install `langchain-foreword`. There is no key and no server.

        ```bash
        pip install langchain-foreword
        ```

    Key init args:
        model: a known name, a checkpoint directory, a `.gguf` file or a hub repository.
        temperature, top_p, top_k, max_tokens, stop, seed, ...: sampling options, each also accepted by every call.
        engine_options: options of the engine, e.g. `{"kv_cache_memory": "1GiB"}`.
        engine: a running `foreword.Engine` to use instead of the shared one.

    Instantiate:
        ```python
        from langchain_foreword import ChatForeword

        llm = ChatForeword(model="smollm2-135m", temperature=0, max_tokens=64)
        ```

    Invoke:
        ```python
        llm.invoke([("system", "You are brief."), ("human", "What is the capital of France?")])
        ```

    Stream:
        ```python
        for chunk in llm.stream("Tell me about Paris."):
            print(chunk.text, end="")
        ```

    Async:
        ```python
        await llm.ainvoke("What is the capital of France?")
        ```

    Batch:
        The engine computes all members together.

        ```python
        llm.batch(["What is the capital of France?", "What is the capital of Japan?"])
        ```

    Usage and cache:
        ```python
        message = llm.invoke("What is the capital of France?")
        message.usage_metadata["input_token_details"]["cache_read"]  # prompt tokens that were not computed again
        ```
    """

    model_config = ConfigDict(extra="forbid")

    streaming: bool = False
    """Whether `invoke` streams, so that callbacks see each token."""

    _profile_is_ours: bool = PrivateAttr(default=False)

    @property
    def _llm_type(self) -> str:
        return "chat-foreword"

    # -- running -----------------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        model, params = self._call(stop, kwargs)
        turns = to_dicts(messages)
        engine = self._handle.get(model)
        return chat_result(engine, engine.chat(turns, params))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        model, params = self._call(stop, kwargs)
        turns = to_dicts(messages)
        engine = await self._handle.aget(model)
        return chat_result(engine, await engine.achat(turns, params))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        model, params = self._call(stop, kwargs)
        turns = to_dicts(messages)
        engine = self._handle.get(model)
        pieces = engine.stream_chat(turns, self._one_stream(params))
        with contextlib.closing(pieces):  # closing it cancels the request
            for piece in pieces:
                chunk = chat_chunk(engine, piece)
                if chunk is None:
                    continue
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        model, params = self._call(stop, kwargs)
        turns = to_dicts(messages)
        engine = await self._handle.aget(model)
        pieces = engine.astream_chat(turns, self._one_stream(params))
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                chunk = chat_chunk(engine, piece)
                if chunk is None:
                    continue
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        """LangChain's streams carry one answer, so a call for several is not rerouted to a stream."""
        return kwargs.get("n", self.n) > 1 or super()._streaming_disabled(**kwargs)

    def batch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Answer all `inputs` as one batch of the engine, or `max_concurrency` of them at a time."""
        return self._batch_together(inputs, config, return_exceptions=return_exceptions, **kwargs)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Any = None,
        *,
        run_id: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer several conversations as one batch of the engine; LangChain's own takes one after the other."""
        if len(messages) < 2:
            return super().generate(messages, stop, callbacks, run_id=run_id, **kwargs)
        one = super().generate
        run_ids = [run_id] + [None] * (len(messages) - 1)
        with ContextThreadPoolExecutor(max_workers=min(len(messages), MAX_THREADS)) as pool:
            calls = pool.map(lambda m, own_id: one([m], stop, callbacks, run_id=own_id, **kwargs), messages, run_ids)
            results = list(calls)
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or []] or None,
        )

    # -- what LangChain wants to know --------------------------------------------------------------------------

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LLM-cache entries; also holds engine options, which serialisation leaves out."""
        return str(sorted(self._get_invocation_params(stop=stop, **kwargs).items()))

    def get_engine(self) -> Engine:
        engine = super().get_engine()
        if self._profile_is_ours:
            self.profile = self._profile(engine)
        return engine

    def _resolve_model_profile(self) -> Any:
        """Called when no `profile` was given. The context length is known once the engine is."""
        self._profile_is_ours = True
        return self._profile(self.engine)

    def _profile(self, engine: Engine | None) -> Any:
        length = engine.max_model_len if engine is not None else self.engine_options.get("max_model_len")
        profile: dict[str, Any] = {
            "text_inputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "text_outputs": True,
            "reasoning_output": False,
            "tool_calling": False,
            "structured_output": False,
        }
        return profile | ({"max_input_tokens": length, "max_output_tokens": length} if length else {})

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """The exact prompt length of a call with these messages, chat template and tools included."""
        definitions = [convert_to_openai_tool(tool) for tool in tools] if tools else None
        return self.get_engine().count_tokens(to_dicts(messages), definitions)
