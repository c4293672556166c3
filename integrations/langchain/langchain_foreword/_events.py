"""Cache events: what a call reused, told to the callbacks of the run it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from langchain_core.callbacks import (
    AsyncCallbackManager,
    BaseCallbackManager,
    CallbackManager,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

if TYPE_CHECKING:
    from foreword import Engine, Usage

PREFIX_CACHE_EVENT = "foreword.prefix_cache"
"""Sent when a call is done; its data are `model`, `prompt_tokens` and `cached_tokens`."""


def dispatch_cache_event(run_manager: Any, engine: Engine, usage: Usage) -> None:
    """Send the event to the model's own run or, in a stream, to the run around it. Without listeners, do nothing."""
    config = _listeners(run_manager, CallbackManager)
    if config is not None:
        dispatch_custom_event(PREFIX_CACHE_EVENT, _data(engine, usage), config=config)


async def adispatch_cache_event(run_manager: Any, engine: Engine, usage: Usage) -> None:
    """As `dispatch_cache_event`, for asyncio."""
    config = _listeners(run_manager, AsyncCallbackManager)
    if config is not None:
        await adispatch_custom_event(PREFIX_CACHE_EVENT, _data(engine, usage), config=config)


def _data(engine: Engine, usage: Usage) -> dict[str, Any]:
    return {"model": engine.model, "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}


def _listeners(run_manager: Any, kind: type[BaseCallbackManager]) -> RunnableConfig | None:
    """A config whose callbacks belong to a run and have handlers; None if nobody listens."""
    if run_manager is None:  # LangChain hands none to streams
        around: Any = (var_child_runnable_config.get() or {}).get("callbacks")
        if not isinstance(around, BaseCallbackManager) or around.parent_run_id is None or not around.handlers:
            return None
        return {"callbacks": around}
    if not getattr(run_manager, "handlers", None):
        return None
    own = kind(
        handlers=run_manager.handlers,
        inheritable_handlers=run_manager.inheritable_handlers,
        parent_run_id=run_manager.run_id,
        tags=run_manager.tags,
        metadata=run_manager.metadata,
    )
    return cast("RunnableConfig", {"callbacks": own})
