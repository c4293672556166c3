"""Tools: their definitions on the way in, their calls on the way out."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import ToolMetadata
from pydantic_core import from_json

from foreword import StructuredParams
from llama_index.llms.foreword._messages import tool_calls

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatResponse
    from pydantic import BaseModel


def definitions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """OpenAI-style definitions of LlamaIndex tools; those that are dicts already are left as they are."""
    return [dict(tool) if isinstance(tool, Mapping) else _definition(tool) for tool in tools]


def _definition(tool: Any) -> dict[str, Any]:
    metadata: Any = getattr(tool, "metadata", None)
    if not hasattr(metadata, "to_openai_tool"):
        raise ValueError(f"tools has {tool!r}: give LlamaIndex tools, or OpenAI-style function definitions")
    if type(metadata) is ToolMetadata:
        text = _definition_text(metadata.name, metadata.description, metadata.fn_schema)
        found: dict[str, Any] = json.loads(text)  # every caller gets its own
        return found
    return dict(metadata.to_openai_tool(skip_length_check=True))


@functools.lru_cache(maxsize=512)
def _definition_text(name: str | None, description: str, fn_schema: type[BaseModel] | None) -> str:
    """Making a JSON schema of a class takes a millisecond, too long for every tool of every call."""
    metadata = ToolMetadata(name=name, description=description, fn_schema=fn_schema)
    return json.dumps(metadata.to_openai_tool(skip_length_check=True))


def choice(tool_choice: Any, required: bool = False) -> str:
    """What the engine calls ``tool_choice``; None leaves it to ``required``, OpenAI's dict names a tool.

    Raises:
        ValueError: it is neither text nor OpenAI's dict.
    """
    if tool_choice is None:
        return "required" if required else "auto"
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else tool_choice
    if not isinstance(name, str):
        raise ValueError(
            f'tool_choice={tool_choice!r} is not valid: give "auto", "none", "required", or the name of a tool'
        )
    return name


def check(tools: Sequence[Mapping[str, Any]], tool_choice: str, parallel: bool) -> None:
    """Raise ``ValueError`` now, not when a request is made, for what cannot be enforced; it names the keyword."""
    from foreword import validate_structured  # brings the grammar compiler, which a mere import does not need

    validate_structured(StructuredParams(tools=tuple(tools), tool_choice=tool_choice, parallel_tool_calls=parallel))


def selections(response: ChatResponse) -> list[ToolSelection]:
    """The calls in a response. While it streams, arguments are as far as they can be read.

    Raises:
        ValueError: the answer is finished, but was cut short inside a call.
    """
    done = isinstance(response.raw, Mapping) and "finish_reason" in response.raw
    return [_selection(call, response.raw if done else None) for call in tool_calls(response.message)]


def _selection(call: Mapping[str, Any], final: Mapping[str, Any] | None) -> ToolSelection:
    name, arguments = call["function"]["name"] or "", call["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = _whole(name, arguments, final) if final is not None else _so_far(arguments)
    return ToolSelection(tool_id=call["id"] or "", tool_name=name, tool_kwargs=arguments or {})


def _whole(name: str, arguments: str, final: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(arguments)
    except RecursionError as error:
        raise ValueError(f"the arguments of {name} are nested too deeply to be read: {arguments!r}") from error
    except ValueError as error:
        why = "max_tokens is too small" if final["finish_reason"] == "length" else "a stop string ended it"
        raise ValueError(f"the call of {name} was cut short ({why}), its arguments are {arguments!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the arguments of {name} are no JSON object: {arguments!r}")
    return found


def _so_far(arguments: str) -> dict[str, Any]:
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
