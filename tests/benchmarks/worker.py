"""Runs one engine in a process of its own, in the interpreter that has it: JSON lines in, JSON lines out.

Started by :mod:`processes` as a script; needs the standard library and the engine's adapter only. Requests are
``{"call": "load" | "generate" | "reset" | "versions", ...}``; an exception is answered with ``{"failed": traceback}``.

An adapter is a module of ``adapters/`` with a class ``Adapter`` of this form::

    packages: names of the distributions whose versions matter
    notes: how the engine was set up, once it is loaded
    __init__(variant, model, threads)    loads the engine; model is a path
    generate(prompts, max_tokens)        token ids in; per prompt a dict with token_ids, and cached_tokens or error
    reset()                              forgets cached KV, if the engine can
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class Worker:
    """Answers requests with one adapter."""

    def __init__(self) -> None:
        self._adapter: Any = None

    def load(self, adapter: str, variant: str, model: str, threads: int) -> dict[str, Any]:
        """Make the engine. ``adapter`` is a file; it is loaded by its path, as its name may be that of a package."""
        spec = importlib.util.spec_from_file_location(f"adapter_{Path(adapter).stem}", adapter)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._adapter = module.Adapter(variant, model, threads)
        return {"notes": self._adapter.notes}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Complete prompts; ``seconds`` is the wall time of the engine's own call."""
        start_s = time.perf_counter()
        outputs = self._adapter.generate(prompts, max_tokens)
        return {"seconds": time.perf_counter() - start_s, "outputs": outputs}

    def reset(self) -> dict[str, Any]:
        self._adapter.reset()
        return {}

    def versions(self) -> dict[str, Any]:
        """Versions of the packages that matter, and of the interpreter."""
        found = {"python": ".".join(map(str, sys.version_info[:3]))}
        for package in self._adapter.packages:
            found[package] = importlib.metadata.version(package)
        return {"versions": found}


_PR_SET_PDEATHSIG = 1


def main() -> None:
    # A stopped process does not notice that the benchmark is gone; the kernel ends it then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.pop(0)  # this folder: its modules must not stand in for packages
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes to the log, line by line, so that it is there when one dies
    sys.stdout.reconfigure(line_buffering=True)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("call"))(**request)
        except Exception:
            reply = {"failed": traceback.format_exc()}
        channel.write(json.dumps(reply) + "\n")
        channel.flush()
    os._exit(0)  # some engines hang in their destructors


if __name__ == "__main__":
    main()
