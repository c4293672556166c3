"""Calls of the engine: whole, streamed, and both for asyncio."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse

from llama_index.llms.foreword._options import Call, ForewordOptions, Prompt
from llama_index.llms.foreword._turn import Turn

if TYPE_CHECKING:
    from foreword import Engine, OutputChunk

Response = TypeVar("Response", ChatResponse, CompletionResponse)
Respond = Callable[..., Response]


class ForewordCalls(ForewordOptions):
    """How :class:`Foreword` runs a prompt; ``respond`` makes the response of its kind."""

    def _run(self, prompt: Prompt, options: dict[str, Any], respond: Respond[Response]) -> Response:
        call = self._call(prompt, options)
        engine = self._handle.get(self.model)
        if isinstance(call.prompt, str):
            output = engine.generate(call.prompt, call.params)
        else:
            output = engine.chat(call.prompt, call.params, **call.chat)
        return respond(engine, Turn.of(output.outputs[0]), output.outputs[0], output)

    async def _arun(self, prompt: Prompt, options: dict[str, Any], respond: Respond[Response]) -> Response:
        call = self._call(prompt, options)
        engine = await self._handle.aget(self.model)
        if isinstance(call.prompt, str):
            output = await engine.agenerate(call.prompt, call.params)
        else:
            output = await engine.achat(call.prompt, call.params, **call.chat)
        return respond(engine, Turn.of(output.outputs[0]), output.outputs[0], output)

    def _stream(
        self, prompt: Prompt, options: dict[str, Any], respond: Respond[Response]
    ) -> Generator[Response, None, None]:
        """Input errors are raised here, before the first response is asked for."""
        call = self._call(prompt, options)
        engine = self._handle.get(self.model)
        pieces = _pieces(engine, call)

        def responses() -> Generator[Response, None, None]:
            turn = Turn()
            with contextlib.closing(pieces):  # closing it cancels the request
                for piece in pieces:
                    if turn.add(piece):
                        yield respond(engine, turn, piece, piece.output, delta=turn.delta)

        return responses()

    async def _astream(
        self, prompt: Prompt, options: dict[str, Any], respond: Respond[Response]
    ) -> AsyncGenerator[Response, None]:
        call = self._call(prompt, options)
        engine = await self._handle.aget(self.model)
        pieces = _apieces(engine, call)

        async def responses() -> AsyncGenerator[Response, None]:
            turn = Turn()
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if turn.add(piece):
                        yield respond(engine, turn, piece, piece.output, delta=turn.delta)

        return responses()


def _pieces(engine: Engine, call: Call) -> Generator[OutputChunk, None, None]:
    if isinstance(call.prompt, str):
        return engine.stream(call.prompt, call.params)
    return engine.stream_chat(call.prompt, call.params, **call.chat)


def _apieces(engine: Engine, call: Call) -> AsyncGenerator[OutputChunk, None]:
    if isinstance(call.prompt, str):
        return engine.astream(call.prompt, call.params)
    return engine.astream_chat(call.prompt, call.params, **call.chat)
