"""What tests of Triton's kernels need where there is no GPU: products whose rows are alike."""

from __future__ import annotations

from typing import Any

import numpy as np


def dot(_: Any, a: Any, b: Any, c: Any, *__: Any) -> Any:
    """``tl.dot`` under the interpreter with rows that are computed alike wherever in the tile they are, as a GPU's
    matrix units do: NumPy's, which it takes, are not such."""
    from triton.runtime.interpreter import TensorHandle

    product = np.einsum("mk,kn->mn", a.data.astype(np.float32), b.data.astype(np.float32))
    return TensorHandle(product + c.data, c.dtype.scalar)


def prepare() -> None:
    """From here on in this process, under the interpreter: rows alike, and a fifth of the time saved by leaving out
    the checks of integers for overflow."""
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
