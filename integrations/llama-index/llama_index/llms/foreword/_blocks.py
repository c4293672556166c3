"""Content blocks that not every supported llama-index-core has."""

from __future__ import annotations

from typing import Any

try:
    from llama_index.core.base.llms.types import ThinkingBlock as _ThinkingBlock
    from llama_index.core.base.llms.types import ToolCallBlock as _ToolCallBlock
except ImportError:  # before 0.14.5; there, calls and reasoning live in ``additional_kwargs`` alone
    ThinkingBlock: Any = None
    ToolCallBlock: Any = None
else:
    ThinkingBlock, ToolCallBlock = _ThinkingBlock, _ToolCallBlock


def is_thinking(block: Any) -> bool:
    return ThinkingBlock is not None and isinstance(block, ThinkingBlock)


def is_tool_call(block: Any) -> bool:
    return ToolCallBlock is not None and isinstance(block, ToolCallBlock)
