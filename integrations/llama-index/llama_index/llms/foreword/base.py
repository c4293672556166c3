"""The LLM."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar

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
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt

from llama_index.llms.foreword._messages import to_dicts
from llama_index.llms.foreword._options import SAMPLING_FIELDS, ForewordOptions
from llama_index.llms.foreword._responses import chat_response, completion_response

Response = TypeVar("Response", ChatResponse, CompletionResponse)
Prompt = str | list[dict[str, Any]]
"""A text that goes to the model as it is, or messages that go through its chat template."""


class Foreword(ForewordOptions):
    """An LLM that runs in this process and computes every shared beginning once.

    The model loads on first use. LLMs with equal ``model`` and ``engine_options`` share one engine, also with
    LangChain's ``ChatForeword``, and so the same cache.

    Args:
        model: a known name, a checkpoint directory, a ``.gguf`` file or a hub repository.
        engine: a running :class:`foreword.Engine` to use instead of the shared one.
        engine_options: options of the shared engine, e.g. ``{"kv_cache_memory": "1GiB"}``.
        is_chat_model: False for a base model: prompts are sent as they are.
        temperature, max_tokens, top_p, stop, seed, ...: sampling options, each also accepted by every call.

    Examples:
        `pip install llama-index-llms-foreword`

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
            is_function_calling_model=False,
            model_name=self.model,
            system_role=MessageRole.SYSTEM,
        )

    def to_payload(self) -> dict[str, Any]:
        """What events say about this LLM; unlike :attr:`metadata` it never loads a model."""
        options = {name: getattr(self, name) for name in SAMPLING_FIELDS}
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

    def _prepare_chat_with_tools(self, *_: Any, tool_required: bool = False, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "Foreword does not call functions yet (metadata.is_function_calling_model is False): use a ReActAgent"
        )

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

    # -- running -----------------------------------------------------------------------------------------------

    def _run(self, prompt: Prompt, options: dict[str, Any], respond: Callable[..., Response]) -> Response:
        params = self._sampling(options)
        engine = self._handle.get(self.model)
        output = engine.generate(prompt, params) if isinstance(prompt, str) else engine.chat(prompt, params)
        return respond(engine, output.text, output.outputs[0], output)

    async def _arun(self, prompt: Prompt, options: dict[str, Any], respond: Callable[..., Response]) -> Response:
        params = self._sampling(options)
        engine = await self._handle.aget(self.model)
        if isinstance(prompt, str):
            output = await engine.agenerate(prompt, params)
        else:
            output = await engine.achat(prompt, params)
        return respond(engine, output.text, output.outputs[0], output)

    def _stream(
        self, prompt: Prompt, options: dict[str, Any], respond: Callable[..., Response]
    ) -> Generator[Response, None, None]:
        """Input errors are raised here, before the first response is asked for."""
        params = self._sampling(options)
        engine = self._handle.get(self.model)
        pieces = engine.stream(prompt, params) if isinstance(prompt, str) else engine.stream_chat(prompt, params)

        def responses() -> Generator[Response, None, None]:
            text = ""
            with contextlib.closing(pieces):  # closing it cancels the request
                for piece in pieces:
                    text += piece.text
                    if _is_worth_showing(piece):
                        yield _with_delta(respond(engine, text, piece, piece.output), piece.text)

        return responses()

    async def _astream(
        self, prompt: Prompt, options: dict[str, Any], respond: Callable[..., Response]
    ) -> AsyncGenerator[Response, None]:
        params = self._sampling(options)
        engine = await self._handle.aget(self.model)
        pieces = engine.astream(prompt, params) if isinstance(prompt, str) else engine.astream_chat(prompt, params)

        async def responses() -> AsyncGenerator[Response, None]:
            text = ""
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    text += piece.text
                    if _is_worth_showing(piece):
                        yield _with_delta(respond(engine, text, piece, piece.output), piece.text)

        return responses()


def _is_worth_showing(piece: Any) -> bool:
    return bool(piece.text) or piece.logprobs is not None or piece.output is not None


def _with_delta(response: Response, delta: str) -> Response:
    response.delta = delta
    return response
