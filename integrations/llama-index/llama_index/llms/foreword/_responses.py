"""Engine outputs as LlamaIndex responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, LogProb

if TYPE_CHECKING:
    from foreword import CompletionOutput, Engine, OutputChunk, RequestOutput
    from llama_index.llms.foreword._turn import Turn

    Piece = CompletionOutput | OutputChunk


def completion_response(
    engine: Engine, turn: Turn, piece: Piece, output: RequestOutput | None, delta: str | None = None
) -> CompletionResponse:
    """The text so far and, in a stream, what was new; with the ``output`` of a finished request also its usage."""
    rest = _rest(engine, turn, piece, output)
    if output is not None and turn.reasoning:
        rest["additional_kwargs"]["reasoning_content"] = turn.reasoning
    return CompletionResponse(text=turn.content, delta=delta, **rest)


def chat_response(
    engine: Engine, turn: Turn, piece: Piece, output: RequestOutput | None, delta: str | None = None
) -> ChatResponse:
    """The assistant's message so far; the rest as in :func:`completion_response`."""
    return ChatResponse(message=turn.message(), delta=delta, **_rest(engine, turn, piece, output))


def raw(engine: Engine, turn: Turn, output: RequestOutput) -> dict[str, Any]:
    """What is known when a request is done; in a stream it comes with the last response.

    ``usage`` has the keys that LlamaIndex's ``TokenCountingHandler`` reads.
    """
    usage, completion = output.usage, output.outputs[0]
    called = turn.has_calls and completion.finish_reason == "stop"
    found: dict[str, Any] = {
        "model": engine.model,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "finish_reason": "tool_calls" if called else completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "timing": usage.timing(),
        "prefix_cache": output.prefix_cache(),
    }
    if not completion.complete:
        found["complete"] = False  # of structured output: a number that was cut looks like a whole one
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = output.prompt_logprobs
    return found


def _rest(engine: Engine, turn: Turn, piece: Piece, output: RequestOutput | None) -> dict[str, Any]:
    rest: dict[str, Any] = {"logprobs": _logprobs(engine, piece), "additional_kwargs": {}}
    if turn.thinking_delta:
        rest["additional_kwargs"]["thinking_delta"] = turn.thinking_delta  # which agents pass on to their streams
    if output is not None:
        rest["raw"] = raw(engine, turn, output)
        rest["additional_kwargs"] |= rest["raw"]["usage"]
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
