"""Engine outputs as LangChain's messages, generations and metadata."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from langchain_core.utils.json import parse_partial_json

from foreword import AssistantMessage, MessageDelta, ToolCall

if TYPE_CHECKING:
    from foreword import CompletionOutput, Engine, OutputChunk, RequestOutput, Usage

_MARKS = ("]", "}", '"]', '"}', '""]', '""}')


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
        "prefix_cache": output.prefix_cache(),
    }
    if not completion.complete:
        metadata["complete"] = False  # of structured output: a number that was cut looks like a whole one
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


def finish_reason(completion: CompletionOutput) -> str:
    """ "tool_calls" where the answer holds calls and all are complete, else the engine's word."""
    calls = completion.message.tool_calls if completion.message is not None else ()
    complete = bool(calls) and completion.finish_reason in ("stop", "length") and all(map(_is_whole, calls))
    return "tool_calls" if complete else completion.finish_reason


def chat_result(engine: Engine, output: RequestOutput) -> ChatResult:
    """All completions of a request. Its usage is that of the request, so only the first message carries it."""
    generations = []
    for completion in output.outputs:
        answer = completion.message or AssistantMessage(completion.text)
        metadata = response_metadata(engine, output, completion) | logprobs_metadata(engine, completion)
        metadata["finish_reason"] = finish_reason(completion)
        message = AIMessage(
            content=answer.content,
            additional_kwargs={"reasoning_content": answer.reasoning} if answer.reasoning else {},
            **_tool_calls(answer, completion.finish_reason),
            response_metadata=metadata,
            usage_metadata=usage_metadata(engine, output.usage) if completion.index == 0 else None,
        )
        info = {"finish_reason": metadata["finish_reason"]}
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(generations=generations)


def _tool_calls(answer: AssistantMessage, finish_reason: str) -> dict[str, Any]:
    """Calls whose arguments are JSON objects, and apart from them the others."""
    cut = "; max_tokens cut it short, give more" if finish_reason == "length" else ""
    valid, invalid = [], []
    for call in answer.tool_calls:
        try:
            valid.append(tool_call(name=call.name, args=call.parse(), id=call.id))
        except ValueError as error:
            invalid.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=f"{error}{cut}"))
    return {"tool_calls": valid, "invalid_tool_calls": invalid}


def chat_chunk(engine: Engine, chunk: OutputChunk) -> ChatGenerationChunk | None:
    """A piece of a streamed message; None if there is nothing to show. The last one carries usage and metadata."""
    delta = chunk.delta if chunk.delta is not None else MessageDelta(chunk.text)
    if chunk.output is None:
        if chunk.logprobs is not None:
            return _piece(delta, logprobs_metadata(engine, chunk))
        return _piece(delta, {}) if delta else None
    completion = chunk.output.outputs[0]
    calls = _call_chunks(delta)
    if completion.message is not None:
        _mark_cut_short(calls, completion.message.tool_calls)
    metadata = response_metadata(engine, chunk.output, completion) | logprobs_metadata(engine, chunk)
    metadata["finish_reason"] = finish_reason(completion)
    message = AIMessageChunk(
        content=delta.content,
        additional_kwargs={"reasoning_content": delta.reasoning} if delta.reasoning else {},
        tool_call_chunks=calls,
        response_metadata=metadata,
        usage_metadata=usage_metadata(engine, chunk.output.usage),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": metadata["finish_reason"]})


_MESSAGE = AIMessageChunk(content="", additional_kwargs={}, response_metadata={})
_GENERATION = ChatGenerationChunk(message=_MESSAGE)


def _piece(delta: MessageDelta, metadata: dict[str, Any]) -> ChatGenerationChunk:
    """A chunk in the middle of a stream, as a copy of one that was validated once.

    Validation takes 100 us where the weights have just gone through the processor's caches, once per token; and it
    parses each fragment of a call's arguments as if it were whole.
    """
    thought = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
    calls = _call_chunks(delta) if delta.tool_calls else []
    if any(call["name"] for call in calls):  # once per call: LangChain shows which tool it will be
        fields: dict[str, Any] = {"additional_kwargs": thought, "response_metadata": metadata}
        return ChatGenerationChunk(message=AIMessageChunk(content=delta.content, tool_call_chunks=calls, **fields))
    message, generation = copy(_MESSAGE), copy(_GENERATION)
    message.__dict__.update(
        content=delta.content,
        additional_kwargs=thought,
        response_metadata=metadata,
        tool_calls=[],
        invalid_tool_calls=[],
        tool_call_chunks=calls,
    )
    generation.__dict__.update(text=delta.content, message=message)
    return generation


def _call_chunks(delta: MessageDelta) -> list[ToolCallChunk]:
    return [
        tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=call.index) for call in delta.tool_calls
    ]


def _mark_cut_short(chunks: list[ToolCallChunk], calls: tuple[ToolCall, ...]) -> None:
    """Add to the last `chunks` what keeps calls that were cut short among the invalid ones.

    LangChain mends the arguments of added-up chunks, and so a call whose end is missing would be carried out, with
    arguments that the model never finished. A bracket that closes nothing shows it for what it is.
    """
    for index, call in enumerate(calls):
        if not _is_whole(call):
            own = next((chunk for chunk in chunks if chunk["index"] == index), None)
            if own is None:
                chunks.append(tool_call_chunk(args=_mark(call.arguments), index=index))
            else:
                own["args"] = (own["args"] or "") + _mark(call.arguments)


def _is_whole(call: ToolCall) -> bool:
    try:
        call.parse()
    except ValueError:
        return False
    return True


def _mark(arguments: str) -> str:
    """The first of the brackets that LangChain's lenient parser cannot make a dict of."""
    for mark in _MARKS:
        try:
            if not isinstance(parse_partial_json(arguments + mark), dict):
                return mark
        except (ValueError, RecursionError):
            return mark
    return ""


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


def joined(results: list[LLMResult], llm_output: dict[str, Any]) -> LLMResult:
    """The results of calls with one prompt each, as that of one call with all prompts."""
    return LLMResult(
        generations=[result.generations[0] for result in results],
        llm_output=llm_output,
        run=[run for result in results for run in result.run or []] or None,
    )


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
