"""Engine outputs as LlamaIndex responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole

if TYPE_CHECKING:
    from foreword import CompletionOutput, Engine, OutputChunk, RequestOutput

    Piece = CompletionOutput | OutputChunk


def raw(engine: Engine, output: RequestOutput) -> dict[str, Any]:
    """What is known when a request is done; in a stream it comes with the last response.

    ``usage`` has the keys that LlamaIndex's ``TokenCountingHandler`` reads.
    """
    usage, completion = output.usage, output.outputs[0]
    found: dict[str, Any] = {
        "model": engine.model,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "timing": usage.timing(),
        "prefix_cache": {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens},
    }
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = output.prompt_logprobs
    return found


def completion_response(engine: Engine, text: str, piece: Piece, output: RequestOutput | None) -> CompletionResponse:
    """The text so far; with the ``output`` of a finished request also its usage."""
    return CompletionResponse(text=text, **_rest(engine, piece, output))


def chat_response(engine: Engine, text: str, piece: Piece, output: RequestOutput | None) -> ChatResponse:
    """The assistant's message so far; with the ``output`` of a finished request also its usage."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, **_rest(engine, piece, output))


def _rest(engine: Engine, piece: Piece, output: RequestOutput | None) -> dict[str, Any]:
    rest: dict[str, Any] = {"logprobs": _logprobs(engine, piece)}
    if output is not None:
        rest["raw"] = raw(engine, output)
        rest["additional_kwargs"] = dict(rest["raw"]["usage"])
    return rest


def _logprobs(engine: Engine, piece: Piece) -> list[list[LogProb]] | None:
    """Per token, the likeliest first."""
    if piece.logprobs is None:
        return None
    return [
        [_logprob(engine, token, value) for token, value in sorted(found.items(), key=lambda item: -item[1])]
        for found in piece.logprobs
    ]


def _logprob(engine: Engine, token_id: int, value: float) -> LogProb:
    text = engine.decode([token_id])
    return LogProb(token=text, logprob=value, bytes=list(text.encode()))
