"""These tests run on Triton's interpreter, unless there is a GPU; see the conftest above all tests."""

from __future__ import annotations

import os
import sys

if sys.platform != "linux":  # there is no Triton
    collect_ignore_glob = ["test_*.py"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import quicken

    quicken()
