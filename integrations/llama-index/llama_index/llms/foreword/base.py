"""The LLM."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import Model, PydanticProgramMode
from llama_index_instrumentation import get_dispatcher

from llama_index.llms.foreword import _structured, _tools
from llama_index.llms.foreword._messages import to_dicts
from llama_index.llms.foreword._options import SAMPLING_FIELDS, Prompt
from llama_index.llms.foreword._responses import chat_response, completion_response
from llama_index.llms.foreword._running import ForewordCalls

if TYPE_CHECKING:
    from llama_index.core.program.utils import FlexibleModel
    from llama_index.core.tools import BaseTool

    from foreword import CacheExplanation

dispatcher = get_dispatcher(__name__)


class Foreword(ForewordCalls):
    """An LLM that runs in this process and computes every shared beginning once.

    The model loads on first use. LLMs with equal ``model`` and ``engine_options`` share one engine, also with
    LangChain's ``ChatForeword``, and so the same cache.

    Args:
        model: a known name, a checkpoint directory, a ``.gguf`` file or a hub repository.
        engine: a running :class:`foreword.Engine` to use instead of the shared one.
        engine_options: options of the shared engine, e.g. ``{"kv_cache_memory": "1GiB"}``.
        is_chat_model: False for a base model: prompts are sent as they are.
        temperature, max_tokens, top_p, stop, seed, ...: sampling options, each also accepted by every call.
        structured: what every answer must look like, e.g. ``{"choices": ["yes", "no"]}``; more often given to a call.
        cache_salt: cached tokens are shared only with calls of the same salt, e.g. of one tenant.
        canonical_tools: show tools in one order, whatever order they come in, so that they stay cached.
        template_options: further variables of the chat template, e.g. ``{"enable_thinking": False}``.

    Raises:
        ValueError: a field is unknown or out of range; the message names it and what was probably meant.

    Examples:
        ```python
        from llama_index.core import Settings
        from llama_index.llms.foreword import Foreword

        llm = Foreword(model="smollm2-135m", temperature=0, max_tokens=64)
        Settings.llm = llm

        response = llm.complete("What is the capital of France?")
        print(response.text)
        print(response.raw["usage"]["cached_tokens"])  # prompt tokens that were not computed again
        ```
    """

    @classmethod
    def class_name(cls) -> str:
        return "Foreword"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts with. Loads the engine, which knows the context length."""
        return LLMMetadata(
            context_window=self.get_engine().max_model_len,
            num_output=self.max_tokens or DEFAULT_NUM_OUTPUTS,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_chat_model,
            model_name=self.model,
            system_role=MessageRole.SYSTEM,
        )

    def to_payload(self) -> dict[str, Any]:
        """What events say about this LLM; unlike :attr:`metadata` it never loads a model. A salt stays a secret."""
        options = {name: getattr(self, name) for name in SAMPLING_FIELDS if name != "cache_salt"}
        return {"class_name": self.class_name(), "model_name": self.model, **options}

    # -- chat --------------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._run(self._conversation(messages), kwargs, chat_response)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._stream(self._conversation(messages), kwargs, chat_response)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._arun(self._conversation(messages), kwargs, chat_response)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return await self._astream(self._conversation(messages), kwargs, chat_response)

    # -- complete ----------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt.

        A chat model answers it as one user message through its chat template. With ``formatted=True``, and for base
        models (``is_chat_model=False``), the prompt goes to the model as it is.
        """
        return self._run(self._completion(prompt, formatted), kwargs, completion_response)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self._stream(self._completion(prompt, formatted), kwargs, completion_response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return await self._arun(self._completion(prompt, formatted), kwargs, completion_response)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return await self._astream(self._completion(prompt, formatted), kwargs, completion_response)

    # -- tools -------------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002  (part of the interface)
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of a chat in which the model may, or with ``tool_required`` must, call tools.

        Args:
            tool_choice: "auto", "none", "required", or the name of the tool to call; it outdoes ``tool_required``.

        Raises:
            ValueError: a tool's schema cannot be enforced, or the choice is no tool; the message says which.
        """
        user = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or []), *([] if user is None else [user])]
        choice = _tools.choice(tool_choice, tool_required)
        if not tools and choice in ("auto", "none"):
            return {"messages": messages, **kwargs}
        chat: dict[str, Any] = {"tools": _tools.definitions(tools), "tool_choice": choice}
        _tools.check(chat["tools"], choice, allow_parallel_tool_calls)
        return {"messages": messages, **chat, "parallel_tool_calls": allow_parallel_tool_calls, **kwargs}

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002  (part of the interface)
    ) -> list[ToolSelection]:
        """The calls in a response; while it streams, with the arguments that have come so far.

        Raises:
            ValueError: there is none, and ``error_on_no_tool_call``; or the answer was cut short inside one.
        """
        found = _tools.selections(response)
        if not found and error_on_no_tool_call:
            raise ValueError(f"the model called no tool, it answered {response.message.content!r}")
        return found

    # -- structured prediction ---------------------------------------------------------------------------------

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of ``output_cls``: a grammar makes of its JSON schema that no other answer is possible.

        Args:
            llm_kwargs: options of the call, e.g. ``{"max_tokens": 512}``.
            **prompt_args: what fills the prompt's variables.

        Raises:
            ValueError: before anything runs, the schema asks for what a grammar cannot enforce, naming the keyword;
                after, the answer was cut short, or validators of the class refuse it.
        """
        if self._has_own_program():
            predicted: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return predicted
        ask, options = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        if isinstance(ask, str):
            found = _structured.whole_object(output_cls, self.complete(ask, formatted=True, **options))
        else:
            found = _structured.whole_object(output_cls, self.chat(ask, **options))
        dispatcher.event(LLMStructuredPredictEndEvent(output=found))
        return found

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """:meth:`structured_predict` for asyncio."""
        if self._has_own_program():
            predicted: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return predicted
        ask, options = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        if isinstance(ask, str):
            found = _structured.whole_object(output_cls, await self.acomplete(ask, formatted=True, **options))
        else:
            found = _structured.whole_object(output_cls, await self.achat(ask, **options))
        dispatcher.event(LLMStructuredPredictEndEvent(output=found))
        return found

    def stream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | FlexibleModel, None, None]:
        """:meth:`structured_predict` that yields the object as it grows.

        Until the fields are enough for ``output_cls``, it yields objects with the fields so far; the last one is of
        the class. A schema that cannot be enforced raises here, before the first object is asked for.
        """
        if self._has_own_program():
            return super().stream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        ask, options = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        responses: Any
        if isinstance(ask, str):
            responses = self.stream_complete(ask, formatted=True, **options)
        else:
            responses = self.stream_chat(ask, **options)

        def objects() -> Generator[Model | FlexibleModel, None, None]:
            growing = _structured.GrowingObject(output_cls)
            with contextlib.closing(responses):
                for response in responses:
                    found = growing.read(response)
                    if found is not None:
                        dispatcher.event(LLMStructuredPredictInProgressEvent(output=found))
                        yield found
            dispatcher.event(LLMStructuredPredictEndEvent(output=growing.last))

        return objects()

    async def astream_structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        """:meth:`stream_structured_predict` for asyncio."""
        if self._has_own_program():
            return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
        ask, options = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        responses: Any
        if isinstance(ask, str):
            responses = await self.astream_complete(ask, formatted=True, **options)
        else:
            responses = await self.astream_chat(ask, **options)

        async def objects() -> AsyncGenerator[Model | FlexibleModel, None]:
            growing = _structured.GrowingObject(output_cls)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    found = growing.read(response)
                    if found is not None:
                        dispatcher.event(LLMStructuredPredictInProgressEvent(output=found))
                        yield found
            dispatcher.event(LLMStructuredPredictEndEvent(output=growing.last))

        return objects()

    def _has_own_program(self) -> bool:
        """Whether the user asked for one of LlamaIndex's programs by ``pydantic_program_mode``."""
        return self.pydantic_program_mode != PydanticProgramMode.DEFAULT

    def _structured_call(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[str | list[ChatMessage], dict[str, Any]]:
        """What to ask, text for a base model, and with which options."""
        event = LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        dispatcher.event(event)
        schema = _structured.schema_text(output_cls)
        options = _structured.options(schema, llm_kwargs)
        if self.is_chat_model:
            return _structured.with_instructions(self._get_messages(prompt, **prompt_args), schema), options
        return f"{self._get_prompt(prompt, **prompt_args)}\n\n{_structured.instructions(schema)}\n", options

    # -- the cache ---------------------------------------------------------------------------------------------

    def explain(
        self,
        prompt: str | Sequence[ChatMessage],
        tools: Sequence[BaseTool] | None = None,
        *,
        formatted: bool = False,
        **kwargs: Any,
    ) -> CacheExplanation:
        """How much of the prompt of a call is cached, and where and why the match ends. Runs nothing.

        Args:
            prompt: messages as for :meth:`chat`, or a text as for :meth:`complete`.
            tools: as :meth:`chat_with_tools` takes them.
            formatted: as for :meth:`complete`.
            **kwargs: options of the call.
        """
        asked = self._completion(prompt, formatted) if isinstance(prompt, str) else self._conversation(prompt)
        call = self._call(asked, kwargs if tools is None else {**kwargs, "tools": tools})
        return self._handle.get(self.model).explain(call.prompt, params=call.params, **call.chat)

    # -- prompts -----------------------------------------------------------------------------------------------

    def _conversation(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Messages for the chat template, or the text that the caller's own ``messages_to_prompt`` makes of them."""
        if self.messages_to_prompt not in (None, generic_messages_to_prompt):
            return self.messages_to_prompt(messages)
        return to_dicts(messages)

    def _completion(self, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return prompt
        if self.completion_to_prompt not in (None, default_completion_to_prompt):
            return self.completion_to_prompt(prompt)
        if not self.is_chat_model:
            return self._extend_prompt(prompt)
        return to_dicts(self._extend_messages([ChatMessage(role=MessageRole.USER, content=prompt)]))
