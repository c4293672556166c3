"""What follows a model that was asked for structured output: parsers that accept whole answers only."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_foreword._tools import ANY_OBJECT, json_schema, openai_tools, schema_name

METHODS = ("json_schema", "function_calling", "json_mode")


def structured_model(
    model: Any,
    schema: Any,
    on_top: Callable[[Runnable[Any, Any]], Runnable[Any, Any]],
    *,
    method: str = "json_schema",
    include_raw: bool = False,
    strict: bool | None = None,
    tools: Any = None,
    **options: Any,
) -> Runnable[Any, Any]:
    """`model.with_structured_output(schema, ...)`, where `on_top` adds what was bound to the model before."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: give one of {', '.join(map(repr, METHODS))}")
    if schema is None and method != "json_mode":
        raise ValueError(f"method={method!r} needs a schema: give a Pydantic class, a TypedDict or a JSON schema")
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": _traced_schema(schema)}
    if method == "function_calling":
        if tools:
            raise ValueError("method='function_calling' makes a tool of the schema: for other tools use 'json_schema'")
        name = openai_tools([schema])[0]["function"]["name"]
        llm = model.bind_tools(
            [schema],
            tool_choice={"type": "function", "function": {"name": name}},
            parallel_tool_calls=False,
            strict=strict,
            ls_structured_output_format=traced,
            **options,
        )
        return _parsed(on_top(llm), _call_parser(schema, name), include_raw=include_raw)
    wanted = ANY_OBJECT if schema is None else json_schema(schema)
    response_format = {"type": "json_schema", "json_schema": {"name": schema_name(schema), "schema": wanted}}
    llm = model.bind_tools(tools or [], response_format=response_format, ls_structured_output_format=traced, **options)
    return _parsed(on_top(llm), _answer_parser(schema), include_raw=include_raw)


def _traced_schema(schema: Any) -> Any:
    """The schema in the form in which traces show it: LangChain converts it in every call, which is quick for this."""
    if schema is None:
        return ANY_OBJECT
    try:
        return convert_to_json_schema(schema)
    except ValueError:
        return schema  # a JSON schema without a title; LangChain leaves it out


class _WholeAnswer(JsonOutputParser):
    """LangChain's JSON parsers mend an answer that was cut short; in a finished answer that would hide the loss."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_answer(result[0])
        return super().parse_result(result, partial=partial)


class _WholeObject(PydanticOutputParser[Any]):
    """As `_WholeAnswer`, for instances of a Pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_answer(result[0])
        return super().parse_result(result, partial=partial)


class _WholeArguments(JsonOutputKeyToolsParser):
    """LangChain's tool parsers give None where no call is complete; here that is an error."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_call(result[0])
        return super().parse_result(result, partial=partial)


class _WholeCall(PydanticToolsParser):
    """As `_WholeArguments`, for instances of a Pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_call(result[0])
        return super().parse_result(result, partial=partial)


def _answer_parser(schema: Any) -> Runnable[Any, Any]:
    """From a message whose text is JSON to an instance of `schema`, if that is a Pydantic class, or to a dict."""
    return _WholeObject(pydantic_object=schema) if _is_pydantic(schema) else _WholeAnswer()


def _call_parser(schema: Any, name: str) -> Runnable[Any, Any]:
    """From a message that calls the tool `name` to an instance of `schema`, or to the arguments as a dict."""
    if _is_pydantic(schema):
        return _WholeCall(tools=[schema], first_tool_only=True)
    return _WholeArguments(key_name=name, first_tool_only=True)


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _parsed(llm: Runnable[Any, Any], parser: Runnable[Any, Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """`llm | parser`; with `include_raw` a dict of `raw`, `parsed` and `parsing_error`, which then is not raised."""
    if not include_raw:
        return llm | parser
    both = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | both.with_fallbacks([failed], exception_key="parsing_error")


def _check_answer(generation: Generation) -> None:
    message = generation.message if isinstance(generation, ChatGeneration) else None
    if isinstance(message, AIMessage) and message.tool_calls:
        names = ", ".join(call["name"] for call in message.tool_calls)
        raise OutputParserException(
            f"the model called tools ({names}) and gave no answer yet; include_raw=True keeps it"
        )
    try:
        found = json.loads(generation.text)
        if not isinstance(found, (dict, list)) and getattr(message, "response_metadata", {}).get("complete") is False:
            raise ValueError("it ends before the schema allows it")
    except (ValueError, RecursionError) as error:
        reason = f"the answer is no whole JSON ({error}){_cut_short(message)}: {generation.text!r}"
        raise OutputParserException(reason, llm_output=generation.text) from error


def _check_call(generation: Generation) -> None:
    message = generation.message if isinstance(generation, ChatGeneration) else None
    if isinstance(message, AIMessage) and not message.tool_calls:
        began = [f"{call['name']}: {call['args']}" for call in message.invalid_tool_calls]
        raise OutputParserException(
            f"the model made no complete tool call{_cut_short(message)}: {began or message.text!r}"
        )


def _cut_short(message: Any) -> str:
    metadata = getattr(message, "response_metadata", {})
    if metadata.get("finish_reason") == "length":
        return "; it was cut short by max_tokens, give more"
    if isinstance(metadata.get("stop_reason"), str):
        return f"; it was cut short by the stop string {metadata['stop_reason']!r}"
    if metadata.get("stop_reason") is not None:
        return f"; it was cut short by the stop token {metadata['stop_reason']}"
    return ""
