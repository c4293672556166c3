"""Runs engines in turn, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foreword.cli import workloads
from foreword.cli.workloads import WORKLOADS, Ids, Workload

from . import measure
from .catalogue import Entry
from .processes import Worker, WorkerError, Workers

Record = dict[str, Any]
FRESH = {"start": ("process start to first token", "s"), "memory": ("resident after W4", "GB")}
"""What is measured on a process of its own for each run: title and unit."""

_ANSWER_TOKENS = 8


class Bench:
    """Measures entries on workloads, one run of each at a time.

    Args:
        model_of: the path of the model that an entry reads.
        question: a chat prompt, answered once per entry, so that a fast engine that talks nonsense is seen.
        max_seconds: an entry that took longer for a run of a workload runs it no more.

    Attributes:
        records: one per run.
        failures: what could not be run, and why.
        about: by entry its notes, versions and answer.
    """

    def __init__(
        self,
        workers: Workers,
        model_of: Callable[[Entry], Path | str],
        word_ids: Ids,
        question: Ids,
        max_seconds: float,
        say: Callable[[str], None] = print,
    ) -> None:
        self._workers, self._model_of, self._word_ids = workers, model_of, word_ids
        self._question, self._max_seconds, self._say = question, max_seconds, say
        self._over: set[tuple[str, str]] = set()  # entry and workload; "" is all of them
        self.records: list[Record] = []
        self.failures: list[Record] = []
        self.about: dict[str, Record] = {}

    def run(self, entries: Sequence[Entry], chosen: Sequence[Workload], fresh: Sequence[str], runs: int) -> None:
        """Run everything ``runs`` times: per workload and run, one entry after the other."""
        for number in range(runs if fresh else 0):
            for entry in entries:
                self._guard(entry, ",".join(fresh), partial(self._fresh_turn, entry, fresh, number))
        for workload in chosen:
            for number in range(runs):
                for entry in entries:
                    if entry.runs(workload.name):
                        self._guard(entry, workload.name, partial(self._turn, entry, workload, number))

    def _guard(self, entry: Entry, what: str, turn: Callable[[], float]) -> None:
        """Take a turn, which returns the seconds that count, unless the entry is over with it."""
        if {(entry.name, what), (entry.name, "")} & self._over:
            return
        seconds = 0.0
        try:
            seconds = turn()
        except workloads.Disturbed as disturbed:
            self._say(f"{what:6} {entry.name:20} left out: {disturbed}")
        except (WorkerError, RuntimeError) as error:
            loaded = entry.name in self.about
            self._over.add((entry.name, what if loaded else ""))
            self.failures.append({"engine": entry.name, "workload": what, "error": str(error)})
            self._say(f"{what:6} {entry.name:20} FAILED: {error}")
        if seconds > self._max_seconds:
            self._over.add((entry.name, what))

    def _turn(self, entry: Entry, workload: Workload, number: int) -> float:
        worker, new = self._workers.take(entry, self._model_of(entry))
        try:
            if new:
                workloads.warm_up(worker, self._word_ids)
                self._ask(entry, worker)
            seconds = self._measure(entry, worker, workload, number)
        except BaseException:
            worker.close()
            raise
        self._workers.put(entry, worker)
        return seconds

    def _fresh_turn(self, entry: Entry, fresh: Sequence[str], number: int) -> float:
        """Start a process; after its first token let it run W4 and look at its memory."""
        model, load_before = self._model_of(entry), os.getloadavg()
        words = random.Random(f"start/{number}").choices(self._word_ids, k=64)
        worker = self._workers.fresh(entry, model)
        try:
            worker.generate([words], 1)
            seconds = time.perf_counter() - worker.start_s
            if "start" in fresh:
                self._keep(entry, "start", number, load_before, {"value": seconds, "unit": "s", "errors": 0})
            self._ask(entry, worker)
            if "memory" in fresh and entry.runs("memory"):
                result = workloads.run(WORKLOADS["W4"], worker, self._word_ids, f"memory/{number}")
                gigabytes = measure.resident_bytes(worker.pid) / 1e9
                record = {"value": gigabytes, "unit": "GB", "errors": result.errors}
                self._keep(entry, "memory", number, load_before, record)
            return time.perf_counter() - worker.start_s
        finally:
            worker.close()

    def _measure(self, entry: Entry, worker: Worker, workload: Workload, number: int) -> float:
        load_before, busy, own = os.getloadavg(), measure.busy_seconds(), _own_seconds(worker)
        start_s = time.perf_counter()
        result = workloads.run(workload, worker, self._word_ids, str(number))
        passed_s = time.perf_counter() - start_s
        others = measure.busy_seconds() - busy - (_own_seconds(worker) - own)
        share = max(0.0, others / passed_s / (os.cpu_count() or 1))
        record = dataclasses.asdict(result) | {"unit": workload.unit, "others_cpu": round(share, 3)}
        self._keep(entry, workload.name, number, load_before, record)
        return passed_s

    def _keep(self, entry: Entry, name: str, number: int, load_before: tuple[float, ...], result: Record) -> None:
        place = {"workload": name, "engine": entry.name, "run": number}
        loads = {"load_before": list(load_before), "load_after": list(os.getloadavg())}
        self.records.append(place | result | loads)
        others = f", others used {result['others_cpu']:.0%} of the CPUs" if "others_cpu" in result else ""
        errors = f", {result['errors']} requests FAILED" if result["errors"] else ""
        self._say(f"{name:6} {entry.name:20} {result['value']:10.4g} {result['unit']:5}{others}{errors}")

    def _ask(self, entry: Entry, worker: Worker) -> None:
        if entry.name not in self.about:
            answer = worker.generate([self._question], _ANSWER_TOKENS).outputs[0].token_ids
            self.about[entry.name] = {"notes": worker.notes, "versions": worker.versions(), "answer": answer}


def _own_seconds(worker: Worker) -> float:
    """CPU time of the engine, and of this process, which hands it its prompts."""
    return measure.cpu_seconds(worker.pid) + time.process_time()
