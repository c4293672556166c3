"""What a model reads from the config of a run: the cache salt of the tenant it serves."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config

SALT = "cache_salt"


def salt_of(config: RunnableConfig | None) -> str | None:
    """`configurable["cache_salt"]` of a call's config, or else of the chain, graph or agent around it."""
    for given in (config, var_child_runnable_config.get()):
        salt: str | None = ((given or {}).get("configurable") or {}).get(SALT)
        if salt is not None:
            return salt
    return None


def digest(salt: str) -> str:
    """What may be shown of a salt."""
    return hashlib.sha256(str(salt).encode()).hexdigest()[:16]


def salted(config: RunnableConfig | None, options: dict[str, Any]) -> dict[str, Any]:
    """A call's options; a `cache_salt` from the config joins them unless they hold one."""
    if SALT in options:
        return options
    salt = salt_of(config)
    return options if salt is None else {**options, SALT: salt}


class SaltedRuns:
    """Mixin before LangChain's base classes: they hand no config to `_generate`, so it is read where a run begins."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().invoke(input, config, **salted(config, kwargs))  # type: ignore[misc]

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return await super().ainvoke(input, config, **salted(config, kwargs))  # type: ignore[misc]

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        return super().stream(input, config, **salted(config, kwargs))  # type: ignore[misc,no-any-return]

    def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        return super().astream(input, config, **salted(config, kwargs))  # type: ignore[misc,no-any-return]

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().stream_events(input, config, **salted(config, kwargs))  # type: ignore[misc]

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().astream_events(input, config, **salted(config, kwargs))  # type: ignore[misc]
