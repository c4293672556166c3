"""Worker processes: one per engine and variant, stopped while another is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from foreword.cli.workloads import Ids, Output, Reply

from . import measure
from .catalogue import Entry
from .machine import HERE

RESERVE_BYTES = 5 * 2**30
"""Memory to keep free when another worker is started: the largest peer and its KV cache."""

ADAPTERS = HERE / "adapters"
_GRACE_S = 10


class WorkerError(RuntimeError):
    """The engine raised, or its process ended; the message holds what it said last."""


class Worker:
    """A process with one engine, as a :class:`foreword.cli.workloads.Driver`.

    Attributes:
        start_s: when the process was started, by ``time.perf_counter``.
        notes: how the engine is set up.
    """

    def __init__(self, entry: Entry, peers: Path, model: Path | str, threads: int, log: Path) -> None:
        self._entry, self._log = entry, log
        self.start_s = time.perf_counter()
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [entry.engine.interpreter(peers), HERE / "worker.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=entry.engine.environment(peers, threads),
                start_new_session=True,  # a group of its own, to be stopped as one
            )
        adapter = ADAPTERS / f"{entry.engine.adapter}.py"
        request = {"adapter": str(adapter), "variant": entry.variant, "model": str(model), "threads": threads}
        try:
            self.notes = str(self._call("load", **request)["notes"])
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, prompts: list[Ids], max_tokens: int) -> Reply:
        reply = self._call("generate", prompts=prompts, max_tokens=max_tokens)
        return Reply(reply["seconds"], [Output(**output) for output in reply["outputs"]])

    def reset(self) -> None:
        self._call("reset")

    def versions(self) -> dict[str, str]:
        """By package, and of the interpreter."""
        versions: dict[str, str] = self._call("versions")["versions"]
        return versions

    def pause(self) -> None:
        """Stop it: an idle engine may spin on the processors that another is measured on."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process and all it started."""
        try:
            os.killpg(self.pid, signal.SIGCONT)
            os.killpg(self.pid, signal.SIGTERM)
            self._process.wait(_GRACE_S)
            os.killpg(self.pid, signal.SIGKILL)  # what it left behind
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.communicate()

    def _call(self, call: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(
                f"{self._entry.name}: its process ended with {self._process.wait()}; {self._last_words()}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "failed" in reply:
            raise WorkerError(f"{self._entry.name}: {reply['failed'].strip().splitlines()[-1]}; see {self._log}")
        return reply

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Workers:
    """Keeps workers alive between turns while memory allows; all but the one in use are stopped."""

    def __init__(self, peers: Path, threads: int, logs: Path) -> None:
        self._peers, self._threads, self._logs = peers, threads, logs
        self._alive: dict[str, Worker] = {}  # in order of use

    def fresh(self, entry: Entry, model: Path | str) -> Worker:
        """A new worker, which the caller closes."""
        self._make_room()
        return Worker(entry, self._peers, model, self._threads, self._logs / f"{entry.name.replace(':', '-')}.log")

    def take(self, entry: Entry, model: Path | str) -> tuple[Worker, bool]:
        """The worker of an entry, running, and whether it is new; give it back with :meth:`put`."""
        worker = self._alive.pop(entry.name, None)
        if worker is None:
            return self.fresh(entry, model), True
        worker.resume()
        return worker, False

    def put(self, entry: Entry, worker: Worker) -> None:
        worker.pause()
        self._alive[entry.name] = worker

    def _make_room(self) -> None:
        """Turns go round: the worker used last is the one not needed for the longest time."""
        while self._alive and measure.available_bytes() < RESERVE_BYTES:
            self._alive.popitem()[1].close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._alive:
            self._alive.popitem()[1].close()
