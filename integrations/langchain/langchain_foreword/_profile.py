"""What LangChain's middleware wants to know of a model before it calls it."""

from __future__ import annotations

from typing import Any


def model_profile(max_tokens: int | None, *, can_reason: bool) -> Any:
    """A model's abilities, and its context of `max_tokens` if that is known."""
    profile: dict[str, Any] = {
        "text_inputs": True,
        "image_inputs": False,
        "audio_inputs": False,
        "video_inputs": False,
        "text_outputs": True,
        "image_outputs": False,
        "audio_outputs": False,
        "video_outputs": False,
        "reasoning_output": can_reason,
        "tool_calling": True,
        "tool_choice": True,
        "tool_call_streaming": True,
        "structured_output": True,
    }
    return profile | ({"max_input_tokens": max_tokens, "max_output_tokens": max_tokens} if max_tokens else {})
