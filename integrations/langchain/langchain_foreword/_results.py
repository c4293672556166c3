"""Engine outputs as LangChain's messages, generations and metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, GenerationChunk

if TYPE_CHECKING:
    from foreword import CompletionOutput, Engine, OutputChunk, RequestOutput, Usage


def usage_metadata(engine: Engine, usage: Usage) -> UsageMetadata:
    """Token counts: `cache_read` tokens were reused, `cache_creation` tokens were computed and kept for later calls."""
    computed = usage.prompt_tokens - usage.cached_tokens
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(
            cache_read=usage.cached_tokens,
            cache_creation=computed if engine.config.enable_prefix_caching else 0,
        ),
    )


def response_metadata(engine: Engine, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """What is known when a request is done; in a stream it comes with the last chunk."""
    usage = output.usage
    metadata: dict[str, Any] = {
        "model_name": engine.model,
        "model_provider": "foreword",
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "timing": usage.timing(),
        "prefix_cache": {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens},
    }
    if output.prompt_logprobs is not None:
        metadata["prompt_logprobs"] = output.prompt_logprobs
    return metadata


def logprobs_metadata(engine: Engine, piece: CompletionOutput | OutputChunk) -> dict[str, Any]:
    """`{"logprobs": {"content": [...]}}` with an entry per token, or nothing; those of a stream's chunks add up."""
    if piece.logprobs is None:
        return {}
    entries = []
    for token_id, found in zip(piece.token_ids, piece.logprobs, strict=True):
        ranked = sorted(found.items(), key=lambda item: -item[1])
        top = [{"token": engine.decode([token]), "token_id": token, "logprob": value} for token, value in ranked]
        entry = {"token": engine.decode([token_id]), "token_id": token_id, "logprob": found[token_id]}
        entries.append(entry | {"top_logprobs": top})
    return {"logprobs": {"content": entries}}


def chat_result(engine: Engine, output: RequestOutput) -> ChatResult:
    """All completions of a request. Its usage is that of the request, so only the first message carries it."""
    generations = []
    for completion in output.outputs:
        metadata = response_metadata(engine, output, completion) | logprobs_metadata(engine, completion)
        message = AIMessage(
            content=completion.text,
            response_metadata=metadata,
            usage_metadata=usage_metadata(engine, output.usage) if completion.index == 0 else None,
        )
        info = {"finish_reason": completion.finish_reason}
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(generations=generations)


def chat_chunk(engine: Engine, chunk: OutputChunk) -> ChatGenerationChunk | None:
    """A piece of a streamed message; None if there is nothing to show. The last one carries usage and metadata."""
    metadata = logprobs_metadata(engine, chunk)
    if chunk.output is None:
        if not chunk.text and not metadata:
            return None
        return ChatGenerationChunk(message=AIMessageChunk(content=chunk.text, response_metadata=metadata))
    message = AIMessageChunk(
        content=chunk.text,
        response_metadata=response_metadata(engine, chunk.output, chunk.output.outputs[0]) | metadata,
        usage_metadata=usage_metadata(engine, chunk.output.usage),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": chunk.finish_reason})


def generations(engine: Engine, output: RequestOutput) -> list[Generation]:
    """All completions of a text prompt; the first one carries the usage of the request."""
    found = []
    for completion in output.outputs:
        info = response_metadata(engine, output, completion) | logprobs_metadata(engine, completion)
        if completion.index == 0:
            info["usage_metadata"] = usage_metadata(engine, output.usage)
        found.append(Generation(text=completion.text, generation_info=info))
    return found


def text_chunk(engine: Engine, chunk: OutputChunk) -> GenerationChunk | None:
    """A piece of a streamed text; None if there is nothing to show. The last one carries usage and metadata."""
    info = logprobs_metadata(engine, chunk)
    if chunk.output is not None:
        info |= response_metadata(engine, chunk.output, chunk.output.outputs[0])
        info["usage_metadata"] = usage_metadata(engine, chunk.output.usage)
    elif not chunk.text and not info:
        return None
    return GenerationChunk(text=chunk.text, generation_info=info or None)


def token_usage(outputs: list[RequestOutput]) -> dict[str, int]:
    """The counts of several requests, added up."""
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    completion = sum(output.usage.completion_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "cached_tokens": sum(output.usage.cached_tokens for output in outputs),
    }
