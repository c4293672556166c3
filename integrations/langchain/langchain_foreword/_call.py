"""What makes up one call of the chat model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from foreword import SamplingParams
    from langchain_foreword._deadline import Limits

CHAT_FIELDS = ("parallel_tool_calls", "canonical_tools", "schema_in_prompt", "template_options")


class ChatCall(NamedTuple):
    """One call, without its messages.

    Attributes:
        options: what `foreword.Engine.chat` takes besides the sampling parameters.
    """

    model: str
    params: SamplingParams
    options: dict[str, Any]
    limits: Limits
