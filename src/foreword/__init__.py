"""Foreword: an LLM engine inside your Python process that computes every shared beginning once.

Everything public is imported from here, on first use: ``import foreword`` itself loads no heavy package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.core.config import EngineConfig
    from foreword.core.errors import (
        EngineClosedError,
        ForewordError,
        ModelLoadError,
        PromptTooLongError,
        RequestFailedError,
    )
    from foreword.core.explanation import CacheExplanation, PromptPiece
    from foreword.core.message import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta
    from foreword.core.outputs import CompletionOutput, EngineStats, OutputChunk, RequestOutput, Usage, Warmed
    from foreword.core.report import CacheReport, DivergencePoint, PrefixSaving
    from foreword.core.sampling import SamplingParams
    from foreword.core.structured import StructuredParams
    from foreword.engine.engine import Engine
    from foreword.engine.handle import EngineHandle
    from foreword.kv.eviction import NodeStats
    from foreword.scheduling.policy import Candidate, SchedulingPolicy
    from foreword.text.grammar import validate_structured

__version__ = "0.1.0"

_HOMES = {
    "EngineConfig": "core.config",
    "EngineClosedError": "core.errors",
    "ForewordError": "core.errors",
    "ModelLoadError": "core.errors",
    "PromptTooLongError": "core.errors",
    "RequestFailedError": "core.errors",
    "CacheExplanation": "core.explanation",
    "PromptPiece": "core.explanation",
    "AssistantMessage": "core.message",
    "MessageDelta": "core.message",
    "ToolCall": "core.message",
    "ToolCallDelta": "core.message",
    "CompletionOutput": "core.outputs",
    "EngineStats": "core.outputs",
    "OutputChunk": "core.outputs",
    "RequestOutput": "core.outputs",
    "Usage": "core.outputs",
    "Warmed": "core.outputs",
    "CacheReport": "core.report",
    "DivergencePoint": "core.report",
    "PrefixSaving": "core.report",
    "SamplingParams": "core.sampling",
    "StructuredParams": "core.structured",
    "Engine": "engine.engine",
    "EngineHandle": "engine.handle",
    "NodeStats": "kv.eviction",
    "Candidate": "scheduling.policy",
    "SchedulingPolicy": "scheduling.policy",
    "validate_structured": "text.grammar",
}

__all__ = [
    "AssistantMessage",
    "CacheExplanation",
    "CacheReport",
    "Candidate",
    "CompletionOutput",
    "DivergencePoint",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineHandle",
    "EngineStats",
    "ForewordError",
    "MessageDelta",
    "ModelLoadError",
    "NodeStats",
    "OutputChunk",
    "PrefixSaving",
    "PromptPiece",
    "PromptTooLongError",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "SchedulingPolicy",
    "StructuredParams",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "Warmed",
    "__version__",
    "validate_structured",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foreword' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"foreword.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
