"""Streams: the engine's pieces as LangChain's chunks, for both models and both kinds of waiting."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.outputs import ChatGenerationChunk, GenerationChunk

from langchain_foreword._errors import langchain_errors
from langchain_foreword._events import adispatch_cache_event, dispatch_cache_event

if TYPE_CHECKING:
    from foreword import Engine, OutputChunk

Chunk = TypeVar("Chunk", GenerationChunk, ChatGenerationChunk)
ToChunk = Callable[["Engine", "OutputChunk"], Chunk | None]


def relay(
    start: Callable[[], Generator[OutputChunk, None, None]], engine: Engine, run_manager: Any, to_chunk: ToChunk[Chunk]
) -> Generator[Chunk, None, None]:
    """The chunks of what `start` gives, each told to `run_manager`; closing them cancels the request."""
    with langchain_errors(), contextlib.closing(start()) as source:
        for piece in source:
            chunk = to_chunk(engine, piece)
            if chunk is None:
                continue
            if piece.usage is not None:
                dispatch_cache_event(run_manager, engine, piece.usage)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


async def arelay(
    start: Callable[[], AsyncGenerator[OutputChunk, None]], engine: Engine, run_manager: Any, to_chunk: ToChunk[Chunk]
) -> AsyncGenerator[Chunk, None]:
    """As `relay`, for asyncio."""
    with langchain_errors():
        async with contextlib.aclosing(start()) as source:
            async for piece in source:
                chunk = to_chunk(engine, piece)
                if chunk is None:
                    continue
                if piece.usage is not None:
                    await adispatch_cache_event(run_manager, engine, piece.usage)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
