"""LangChain models that run on a Foreword engine in this process.

`ChatForeword` is the chat model and the class to start with; `ForewordLLM` completes plain text. Both are imported on
first use, and neither loads torch or the engine before its first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_foreword._version import __version__

if TYPE_CHECKING:
    from langchain_foreword.chat_models import ChatForeword
    from langchain_foreword.llms import ForewordLLM

_HOMES = {"ChatForeword": "chat_models", "ForewordLLM": "llms"}

__all__ = ["ChatForeword", "ForewordLLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'langchain_foreword' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"langchain_foreword.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
