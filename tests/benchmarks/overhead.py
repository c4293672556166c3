"""What the adapters add to a call of the engine: ``python -m tests.benchmarks.overhead``.

Counted is the processor time of the thread that calls, which waits while the engine computes: the adapter's own work
and the engine's preparation, free of the noise of other programs. The same conversations go in turn through the engine,
through the least that the framework's base class allows (a class that passes the text on and nothing else), and through
the adapter. The framework's own work is not small: each piece of text is an object of a validated model and an event,
made when the processor's caches hold the model's weights and nothing of Python.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from foreword import Engine

TOKENS = 64
QUESTION = "Tell me about the sea."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{index}",
            "description": "Does one thing or another with a text and a number.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["text"],
            },
        },
    }
    for index in range(5)
]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
Call = Callable[[int], int]
"""Makes one call of so many tokens; gives the number of pieces it came in."""


def engine_calls(engine: Engine) -> Iterator[tuple[str, Call]]:
    turns = [{"role": "user", "content": QUESTION}]

    def call(tokens: int) -> int:
        engine.chat(turns, max_tokens=tokens, **OPTIONS)
        return 1

    def stream(tokens: int) -> int:
        return sum(1 for _ in engine.stream_chat(turns, max_tokens=tokens, **OPTIONS))

    def tools(tokens: int) -> int:
        engine.chat(turns, tools=TOOLS, max_tokens=tokens, **OPTIONS)
        return 1

    def parallel(tokens: int) -> int:
        async def one() -> int:
            return sum([1 async for _ in engine.astream_chat(turns, max_tokens=tokens, **OPTIONS)])

        return asyncio.run(one())

    yield from (("call", call), ("call, 5 tools", tools), ("stream", stream), ("async stream", parallel))


def langchain_base(engine: Engine) -> Iterator[tuple[str, Call]]:
    """The least that LangChain's base class allows."""
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

    class Relay(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "relay"

        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:  # noqa: ARG002
            turns = [{"role": "user", "content": messages[0].content}]
            message = AIMessage(content=engine.chat(turns, **kwargs, **OPTIONS).text)
            return ChatResult(generations=[ChatGeneration(message=message)])

        def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002
            for piece in engine.stream_chat([{"role": "user", "content": messages[0].content}], **kwargs, **OPTIONS):
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece.text))

        async def _astream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002
            turns = [{"role": "user", "content": messages[0].content}]
            async for piece in engine.astream_chat(turns, **kwargs, **OPTIONS):
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece.text))

    yield from _langchain_ways(Relay(), Relay().bind(tools=TOOLS))


def langchain_calls(engine: Engine) -> Iterator[tuple[str, Call]]:
    from langchain_foreword import ChatForeword

    llm = ChatForeword(engine=engine, **OPTIONS)
    yield from _langchain_ways(llm, llm.bind_tools(TOOLS))


def _langchain_ways(llm: Any, bound: Any) -> Iterator[tuple[str, Call]]:
    def call(tokens: int) -> int:
        llm.invoke(QUESTION, max_tokens=tokens)
        return 1

    def tools(tokens: int) -> int:
        bound.invoke(QUESTION, max_tokens=tokens)
        return 1

    def stream(tokens: int) -> int:
        return sum(1 for _ in llm.stream(QUESTION, max_tokens=tokens))

    def parallel(tokens: int) -> int:
        async def one() -> int:
            return sum([1 async for _ in llm.astream(QUESTION, max_tokens=tokens)])

        return asyncio.run(one())

    yield from (("call", call), ("call, 5 tools", tools), ("stream", stream), ("async stream", parallel))


def llama_index_base(engine: Engine) -> Iterator[tuple[str, Call]]:
    """The least that LlamaIndex's base class allows."""
    from llama_index.core.llms import ChatMessage, ChatResponse, CustomLLM, LLMMetadata
    from llama_index.core.llms.callbacks import llm_chat_callback

    def turns(messages: Any) -> Any:
        return [{"role": "user", "content": messages[0].content}]

    def answer(text: str, delta: str | None = None) -> ChatResponse:
        return ChatResponse(message=ChatMessage(role="assistant", content=text), delta=delta)

    class Relay(CustomLLM):
        @property
        def metadata(self) -> LLMMetadata:
            return LLMMetadata()

        def complete(self, *_: Any, **__: Any) -> Any: ...
        def stream_complete(self, *_: Any, **__: Any) -> Any: ...

        @llm_chat_callback()
        def chat(self, messages: Any, **kwargs: Any) -> Any:
            return answer(engine.chat(turns(messages), **kwargs, **OPTIONS).text)

        @llm_chat_callback()
        def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
            def pieces() -> Any:
                text = ""
                for piece in engine.stream_chat(turns(messages), **kwargs, **OPTIONS):
                    text += piece.text
                    yield answer(text, piece.text)

            return pieces()

        @llm_chat_callback()
        async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
            async def pieces() -> Any:
                text = ""
                async for piece in engine.astream_chat(turns(messages), **kwargs, **OPTIONS):
                    text += piece.text
                    yield answer(text, piece.text)

            return pieces()

    yield from _llama_index_ways(Relay())


def llama_index_calls(engine: Engine) -> Iterator[tuple[str, Call]]:
    from llama_index.llms.foreword import Foreword

    yield from _llama_index_ways(Foreword(engine=engine, **OPTIONS))


def _llama_index_ways(llm: Any) -> Iterator[tuple[str, Call]]:
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="user", content=QUESTION)]

    def call(tokens: int) -> int:
        llm.chat(messages, max_tokens=tokens)
        return 1

    def tools(tokens: int) -> int:
        llm.chat(messages, tools=TOOLS, max_tokens=tokens)
        return 1

    def stream(tokens: int) -> int:
        return sum(1 for _ in llm.stream_chat(messages, max_tokens=tokens))

    def parallel(tokens: int) -> int:
        async def one() -> int:
            return sum([1 async for _ in await llm.astream_chat(messages, max_tokens=tokens)])

        return asyncio.run(one())

    yield from (("call", call), ("call, 5 tools", tools), ("stream", stream), ("async stream", parallel))


def cost(call: Call, tokens: int) -> float:
    """Seconds of this thread's processor time for one call."""
    start = time.thread_time()
    call(tokens)
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with Engine(options.model, kv_cache_memory="256MiB") as engine:
        ways = {
            "engine": dict(engine_calls(engine)),
            "LangChain alone": dict(langchain_base(engine)),
            "LangChain, Foreword": dict(langchain_calls(engine)),
            "LlamaIndex alone": dict(llama_index_base(engine)),
            "LlamaIndex, Foreword": dict(llama_index_calls(engine)),
        }
        print(f"medians of {options.rounds} rounds, the calling thread's processor time: the engine's, what is added\n")
        print(f"| way | {' | '.join(ways)} |")
        print(f"| --- |{' ---: |' * len(ways)}")
        for kind in ways["engine"]:
            lengths = (1, TOKENS + 1) if "stream" in kind else (1,)
            seen: dict[tuple[str, int], list[float]] = {(name, n): [] for name in ways for n in lengths}
            for number in range(options.rounds + 2):
                for name, calls in ways.items():
                    for length in lengths:
                        spent = cost(calls[kind], length)
                        if number >= 2:  # the first rounds warm up
                            seen[name, length].append(spent)
            median = {key: statistics.median(values) for key, values in seen.items()}
            _row(f"{kind}, ms per call", {name: 1e3 * median[name, 1] for name in ways})
            if len(lengths) > 1:
                each = {name: 1e6 * (median[name, TOKENS + 1] - median[name, 1]) / TOKENS for name in ways}
                _row(f"{kind}, µs per token", each)


def _row(label: str, values: dict[str, float]) -> None:
    base, *rest = values.values()
    print(f"| {label} | {base:.2f} | {' | '.join(f'{value - base:.2f}' for value in rest)} |", flush=True)


if __name__ == "__main__":
    main()
