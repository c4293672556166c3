"""Triton's interpreter for the tests of this folder, unless there is a GPU to run them on."""

from __future__ import annotations

import os
import sys

import torch

if sys.platform != "linux":  # there is no Triton
    collect_ignore_glob = ["test_*.py"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Its functions are made for the interpreter, or not, when it is imported: transformers may have done that already.
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]
