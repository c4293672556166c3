"""The benchmark's workloads over an engine that only counts, and the command for users."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine
from foreword.cli import bench, main, workloads
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


def test_a_real_engine_is_a_driver(tiny: Callable[..., Engine]) -> None:
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


def test_a_disturbed_run_is_left_out(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding that took no time at all says nothing about the engine; the other runs count."""
    real, left = workloads.run, iter([workloads.Disturbed("129 tokens came no later than one"), None])

    def run(*arguments: Any) -> workloads.Result:
        if error := next(left):
            raise error
        return real(*arguments)

    monkeypatch.setattr(bench.workloads, "run", run)
    arguments = ["bench", "--model", str(tiny_dir), "--workloads", "W1", "--runs", "2", "--kv-cache-memory", "4MiB"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "W1      left out: 129 tokens came no later than one" in said
    assert "cold first token" in said
