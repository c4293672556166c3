"""The chat model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr

from foreword import EngineHandle
from langchain_foreword._base import MAX_THREADS, ForewordModel
from langchain_foreword._binding import ForewordBinding
from langchain_foreword._call import CHAT_FIELDS, ChatCall
from langchain_foreword._deadline import Limits, apieces, aresult, pieces, result
from langchain_foreword._errors import langchain_errors
from langchain_foreword._events import adispatch_cache_event, dispatch_cache_event
from langchain_foreword._messages import to_dicts
from langchain_foreword._profile import model_profile
from langchain_foreword._relay import arelay, relay
from langchain_foreword._results import chat_chunk, chat_result, joined
from langchain_foreword._runs import digest, salt_of
from langchain_foreword._structured import structured_model
from langchain_foreword._tools import CHOICES, bound_options, chosen_tool, openai_tools, wanted_schema
from langchain_foreword._turnstile import turn

if TYPE_CHECKING:
    from foreword import CacheExplanation, Engine


class ChatForeword(ForewordModel, BaseChatModel):
    """A chat model that runs in this process and computes every shared beginning once.

    Setup:
        Install this package and the engine from a checkout of the repository. There is no key and no server.

        ```bash
        pip install -e . -e integrations/langchain
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

    Tools and structured output:
        Grammars hold calls and answers to their schemas: what comes out always parses.

        ```python
        llm.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
        llm.with_structured_output(City).invoke("Which city is the capital of Japan?")
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

    parallel_tool_calls: bool | None = None
    """Whether one answer may make several calls; None allows it unless there is one tool that has to be called."""

    canonical_tools: bool = True
    """Show tools to the model in the order of their names, so that a list in another order is the same prompt."""

    schema_in_prompt: bool = True
    """Show the schema of structured output to the model, at the end of the system prompt; it is enforced either way."""

    template_options: dict[str, Any] | None = None
    """Further variables of the model's chat template, e.g. `{"enable_thinking": False}`."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds until an answer must be complete. Then the request is cancelled and `TimeoutError` raised."""

    max_retries: int | None = Field(default=0, ge=0)
    """Further attempts when the computation of a request fails (`RequestFailedError`); wrong input is not repeated."""

    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Unused: nothing here needs a key. Programs that hand one to every chat model need not leave it out."""

    _profile_is_ours: bool = PrivateAttr(default=False)

    @property
    def _llm_type(self) -> str:
        return "chat-foreword"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return super()._identifying_params | {name: getattr(self, name) for name in CHAT_FIELDS}

    # -- tools and structured output ---------------------------------------------------------------------------

    def bind(self, **kwargs: Any) -> ForewordBinding:  # type: ignore[override]
        """This model with options that every call of the result gets."""
        return ForewordBinding(bound=self, kwargs=kwargs, config={})

    def with_config(self, config: RunnableConfig | None = None, **kwargs: Any) -> ForewordBinding:
        """This model with a config that every call of the result gets."""
        return ForewordBinding(bound=self, kwargs={}, config=cast("RunnableConfig", {**(config or {}), **kwargs}))

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> ForewordBinding:
        """This model with tools that it can call. Calls are well formed: their grammar is enforced on every token.

        Args:
            tools: functions, Pydantic classes, `BaseTool`s, TypedDicts, or definitions as dicts.
            tool_choice: "auto" or None (the model decides), "none", "any" or "required" (at least one call), a tool's
                name or OpenAI's dict for it, or True for the only tool.
            parallel_tool_calls: allow several calls in one answer; None takes the model's field.
            strict: show the schemas to the model as OpenAI's strict mode has them. They are enforced either way.
            response_format: what an answer that calls no tool must look like: a Pydantic class, a JSON schema,
                `{"type": "json_schema", ...}` or `{"type": "json_object"}`.
            **kwargs: any options of a call, e.g. `max_tokens`.

        Raises:
            ValueError: a schema asks for something that cannot be enforced (the message names the keyword), the
                choice names no tool, or an option is unknown or out of range.
        """
        kwargs |= bound_options(tools, tool_choice, strict, response_format)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        self._chat_call(None, kwargs)  # wrong options are errors here already
        return self.bind(**kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with answers of the given schema.

        Args:
            schema: a Pydantic class (v1 or v2), a TypedDict, a JSON schema or an OpenAI function definition. None is
                any JSON object, in `"json_mode"`.
            method: `"json_schema"` constrains the answer's text; `"json_mode"` is the same; `"function_calling"` makes
                the model call the schema as a tool.
            include_raw: give a dict of `raw` (the message), `parsed` and `parsing_error` instead of raising.
            strict: as in `bind_tools`.
            **kwargs: `tools` that the model may call before it answers (with `include_raw`), and options of a call.

        Returns:
            A runnable that gives instances of Pydantic classes, and dicts for everything else. Streams give what is
            there so far: dicts that grow, and instances once all required fields are there.

        Raises:
            ValueError: the schema asks for something that cannot be enforced; the message names the keyword.
        """
        return structured_model(
            self, schema, lambda llm: llm, method=method, include_raw=include_raw, strict=strict, **kwargs
        )

    # -- running -----------------------------------------------------------------------------------------------

    def _call_options(self) -> list[str]:
        own = ["tools", "tool_choice", "response_format", *CHAT_FIELDS, "timeout", "max_retries"]
        return [*super()._call_options(), *own]

    def _chat_call(self, stop: list[str] | None, options: dict[str, Any], salt: str | None = None) -> ChatCall:
        """Everything about one call but its messages; `salt` is that of the run around it.

        Raises:
            ValueError: an option is unknown or out of range; the message names it.
        """
        options = dict(options)
        tools = openai_tools(options.pop("tools", None))
        choice = chosen_tool(options.pop("tool_choice", None), tools)
        schema = wanted_schema(options.pop("response_format", None))
        if schema is not None:
            if options.get("structured") is not None:
                raise ValueError("response_format and structured cannot be combined: give one of them")
            options["structured"] = {"json_schema": schema}
        given = {name: options.pop(name, None) for name in CHAT_FIELDS}
        chat = {name: getattr(self, name) if value is None else value for name, value in given.items()}
        limits = Limits.checked(options.pop("timeout", self.timeout), options.pop("max_retries", self.max_retries))
        model, params = self._call(stop, options, salt)
        if tools:
            chat |= {"tools": tools, "tool_choice": choice}
            if chat["parallel_tool_calls"] is None:
                forced = choice not in ("auto", "none")
                chat["parallel_tool_calls"] = not forced or (choice in CHOICES and len(tools) > 1)
        elif choice not in ("auto", "none"):
            raise ValueError(f"tool_choice={choice!r}, but there are no tools to choose from: give tools")
        return ChatCall(model, params, {name: value for name, value in chat.items() if value is not None}, limits)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._chat_call(stop, kwargs, salt_of(None))
        engine, turns = self._handle.get(call.model), to_dicts(messages)
        with langchain_errors():
            output = result(
                call.limits,
                lambda: engine.chat(turns, call.params, **call.options),
                lambda: engine.achat(turns, call.params, **call.options),
            )
        dispatch_cache_event(run_manager, engine, output.usage)
        return chat_result(engine, output)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        await turn()
        call = self._chat_call(stop, kwargs, salt_of(None))
        engine, turns = await self._handle.aget(call.model), to_dicts(messages)
        with langchain_errors():
            output = await aresult(call.limits, lambda: engine.achat(turns, call.params, **call.options))
        await turn()
        await adispatch_cache_event(run_manager, engine, output.usage)
        return chat_result(engine, output)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._chat_call(stop, kwargs, salt_of(None))
        params = self._one_stream(call.params)
        engine, turns = self._handle.get(call.model), to_dicts(messages)
        source = pieces(
            call.limits,
            lambda: engine.stream_chat(turns, params, **call.options),
            lambda: engine.astream_chat(turns, params, **call.options),
        )
        yield from relay(lambda: source, engine, run_manager, chat_chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        await turn()
        call = self._chat_call(stop, kwargs, salt_of(None))
        params = self._one_stream(call.params)
        engine, turns = await self._handle.aget(call.model), to_dicts(messages)
        source = apieces(call.limits, lambda: engine.astream_chat(turns, params, **call.options))
        async with contextlib.aclosing(arelay(lambda: source, engine, run_manager, chat_chunk)) as chunks:
            async for chunk in chunks:
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
        return joined(results, self._combine_llm_outputs([result.llm_output for result in results]))

    # -- the cache ---------------------------------------------------------------------------------------------

    def explain(
        self,
        input: LanguageModelInput,
        tools: Sequence[Any] | None = None,
        *,
        config: RunnableConfig | None = None,
        **options: Any,
    ) -> CacheExplanation:
        """How much of a call's prompt is cached, and where and why the match ends. Runs nothing.

        Args:
            input: what `invoke` takes.
            tools: as `bind_tools` takes them; a model with bound tools explains with those.
            config: of the run; a `cache_salt` in it counts.
            **options: options of the call.

        Example:
            ```python
            print(llm.explain([("system", "It is 12:47. You are brief."), ("human", "Hello")]))
            ```
        """
        if tools is not None:
            options["tools"] = tools
        call = self._chat_call(None, options, salt_of(config))
        messages = to_dicts(self._convert_input(input).to_messages())
        with langchain_errors():
            return self._handle.get(call.model).explain(messages, params=call.params, **call.options)

    # -- what LangChain wants to know --------------------------------------------------------------------------

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LLM-cache entries; also holds engine options, which serialisation leaves out."""
        params = self._get_invocation_params(stop=stop, **kwargs)
        if params.get("tools"):
            params["tools"] = openai_tools(params["tools"])
        if params.get("response_format") is not None:  # by its schema: two classes may have one name
            params["response_format"] = wanted_schema(params["response_format"])
        return str(sorted(params.items()))

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """What traces show of a call; of a tenant's salt a digest."""
        params = super()._get_invocation_params(stop=stop, **kwargs)
        if params.get("cache_salt") is not None:
            params["cache_salt"] = digest(params["cache_salt"])
        return params

    def get_engine(self) -> Engine:
        engine = super().get_engine()
        if self._profile_is_ours:
            self.profile = model_profile(engine.max_model_len, can_reason=engine.can_reason)
        return engine

    def _resolve_model_profile(self) -> Any:
        """Called when no `profile` was given.

        The context length is there before the engine is, if `engine_options` have it or the model's files lie on this
        machine: nothing is fetched for it. Whether the model reasons is known once the engine is.
        """
        self._profile_is_ours = True
        if self.engine is not None:
            return model_profile(self.engine.max_model_len, can_reason=self.engine.can_reason)
        length = EngineHandle(self.model, None, self.engine_options).max_model_len(self.model)  # ours is not made yet
        return model_profile(length, can_reason=False)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """The exact prompt length of a call with these messages, chat template and tools included."""
        return self._count_prompt(messages, {} if tools is None else {"tools": tools})

    def _count_prompt(self, messages: list[BaseMessage], options: dict[str, Any]) -> int:
        call = self._chat_call(None, options)
        engine = self.get_engine()
        read = {"cache_salt": call.params.cache_salt, "structured": call.params.structured, **call.options}
        return engine.count_tokens(to_dicts(messages), **read)
