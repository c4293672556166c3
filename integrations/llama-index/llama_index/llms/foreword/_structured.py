"""Structured prediction: a schema that the grammar enforces, and objects read from what has come so far."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.types import Model
from pydantic_core import from_json

from foreword import StructuredParams

if TYPE_CHECKING:
    from pydantic import BaseModel

    Answer = ChatResponse | CompletionResponse

_CORES_OWN = ("tool_required", "tool_choice", "allow_parallel_tool_calls")
"""Options of LlamaIndex's tool-calling programs, which callers give to any LLM; they say nothing to a grammar."""


@functools.lru_cache(maxsize=256)
def schema_text(output_cls: type[BaseModel]) -> str:
    """The JSON schema of a class, as text.

    Raises:
        ValueError: the grammar cannot enforce it; the message names the keyword.
    """
    from foreword import validate_structured

    structured = StructuredParams(json_schema=output_cls.model_json_schema())
    try:
        validate_structured(structured)
    except ValueError as error:
        raise ValueError(f"{output_cls.__name__}: {error}") from error
    return str(structured.json_schema)


def options(schema: str, llm_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of the call that answers in this schema."""
    rest = {name: value for name, value in (llm_kwargs or {}).items() if name not in _CORES_OWN}
    return rest | {"structured": {"json_schema": schema}}


def instructions(schema: str) -> str:
    """What tells the model the meaning of the fields: a grammar decides only how they are written."""
    shown = json.dumps(_without_titles(json.loads(schema)), ensure_ascii=False)
    return f"Answer with one JSON object, and nothing else, that follows this JSON schema:\n{shown}"


def _without_titles(node: Any, names: bool = False) -> Any:
    """A schema without the titles that Pydantic makes of names; ``names`` where keys are names, not keywords.

    They cost tokens and say nothing, and small models take the title of a class for an answer.
    """
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {name: _without_titles(value) for name, value in node.items()}
    return {
        key: value if key in ("const", "default", "enum") else _without_titles(value, key in ("properties", "$defs"))
        for key, value in node.items()
        if key != "title"
    }


def with_instructions(messages: Sequence[ChatMessage], schema: str) -> list[ChatMessage]:
    """New messages, the last of which asks for the schema: all before it stays shared with other calls."""
    block = TextBlock(text=instructions(schema))
    if not messages or messages[-1].role != MessageRole.USER:
        return [*messages, ChatMessage(role=MessageRole.USER, blocks=[block])]
    last = messages[-1]
    asking = ChatMessage(
        role=last.role, blocks=[*last.blocks, TextBlock(text=""), block], additional_kwargs=last.additional_kwargs
    )
    return [*messages[:-1], asking]


def whole_object(output_cls: type[Model], response: Answer) -> Model:
    """The object that a finished response holds.

    Raises:
        ValueError: the answer was cut short, or the class itself refuses the values, beyond what a schema can say.
    """
    text = _text(response)
    final = response.raw if isinstance(response.raw, Mapping) else {}
    if final.get("complete") is False and not text.lstrip().startswith(("{", "[")):
        raise ValueError(
            f"the answer is no whole {output_cls.__name__}: it ends before the schema allows it, "
            f"cut by {'max_tokens' if final['stop_reason'] is None else repr(final['stop_reason'])}: {text[:80]!r}"
        )
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        if isinstance(response.raw, Mapping) and response.raw.get("finish_reason") == "length":
            tokens = response.raw["usage"]["completion_tokens"]
            raise ValueError(
                f"the answer is no whole {output_cls.__name__}: it was cut short after {tokens} tokens; "
                f"give a larger max_tokens. It begins {text[:80]!r}"
            ) from error
        raise


class GrowingObject(Generic[Model]):
    """An object read from a JSON text that grows.

    Attributes:
        last: what :meth:`read` gave last.
    """

    def __init__(self, output_cls: type[Model]) -> None:
        self.last: Model | FlexibleModel | None = None
        self._cls = output_cls
        self._flexible = _flexible(output_cls)
        self._names = {_alias(name, field): name for name, field in output_cls.model_fields.items()}
        self._found: Any = {}

    def read(self, response: Answer) -> Model | FlexibleModel | None:
        """The object so far; None if the response adds nothing to it.

        It is of the class as soon as the fields that are there are enough for it, and at the end. Until then it has
        the fields that have come, and None for the others.

        Raises:
            ValueError: the answer is finished and no whole object; see :func:`whole_object`.
        """
        if response.raw is not None:
            whole = whole_object(self._cls, response)
            known, self.last = whole == self.last, whole
            return None if known else whole
        try:
            found = from_json(_text(response), allow_partial="trailing-strings")
        except ValueError:  # not begun
            return None
        if found == self._found:
            return None
        self._found, self.last = found, self._object(found)
        return self.last

    def _object(self, found: Any) -> Model | FlexibleModel:
        try:
            return self._cls.model_validate(found)
        except ValidationError:
            fields = found if isinstance(found, dict) else {"root": found}
            return self._flexible.model_validate({self._names.get(key, key): value for key, value in fields.items()})


@functools.lru_cache(maxsize=256)
def _flexible(output_cls: type[BaseModel]) -> type[FlexibleModel]:
    return create_flexible_model(output_cls)  # a new class: too dear to make for every token


def _alias(name: str, field: Any) -> str:
    alias = field.validation_alias
    return alias if isinstance(alias, str) else name


def _text(response: Answer) -> str:
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""
