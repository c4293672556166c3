"""What tests of Triton's kernels need where there is no GPU: products whose rows are alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


def dot(_: Any, a: Any, b: Any, c: Any, *__: Any) -> Any:
    """``tl.dot`` under the interpreter with rows that are computed alike wherever in the tile they are, as a GPU's
    matrix units do: NumPy's, which it takes, are not such."""
    from triton.runtime.interpreter import TensorHandle

    product = np.einsum("mk,kn->mn", a.data.astype(np.float32), b.data.astype(np.float32))
    return TensorHandle(product + c.data, c.dtype.scalar)


def quicken() -> None:
    """From here on in this process a third of the time is saved: the language is made the interpreter's own once for
    each function and stays so, instead of at each launch and call; integers are not checked for overflow, which the
    small numbers of tests are far from."""
    from triton.runtime import interpreter

    adapt = interpreter._patch_lang

    @cache
    def adapt_once(function: Any) -> Any:
        return type(adapt(function))()  # another scope, which has nothing to restore

    interpreter._patch_lang = adapt_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def prepare() -> None:
    """From here on in this process, under the interpreter: rows alike, and :func:`quicken`."""
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_dot = dot
    quicken()
