"""Errors that LangChain's own parts look for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions

from foreword import PromptTooLongError

_Overflow: type[Exception] = getattr(exceptions, "ContextOverflowError", Exception)  # langchain-core 1.2 and later


class PromptOverflowError(PromptTooLongError, _Overflow):  # type: ignore[misc, valid-type]
    """A prompt that does not fit, as an error of the engine and of LangChain, whose middleware then shortens it."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Within it, what the engine raises is what LangChain expects."""
    try:
        yield
    except PromptOverflowError:
        raise
    except PromptTooLongError as error:
        raise PromptOverflowError(str(error)) from error
