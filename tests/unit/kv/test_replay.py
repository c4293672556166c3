"""Replays: the recorded run of an agent and RAG with a scan burst, a synthetic burst, and the command."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword.cli import main
from foreword.cli.cache import OPTIMUM, replay_all
from foreword.kv.eviction import POLICIES
from foreword.kv.replay import Replayed, pool_sizes, replay, replay_optimum
from foreword.kv.trace import Trace, TraceHeader, TraceRequest, read_trace

RECORDED = str(Path(__file__).parent / "agent_rag_scan.jsonl.gz")
"""What ``python -m tests.benchmarks.record_trace`` recorded of the default model."""
DEFAULT = next(iter(POLICIES))


@pytest.fixture(scope="module")
def recorded() -> dict[int, dict[str, Replayed]]:
    trace = read_trace(RECORDED)
    return {size: replay_all(trace, size) for size in pool_sizes(trace)}


def scan_burst(seed: int) -> Trace:
    """Users of three agents in conversations, half way a burst of prompts that never return; users go on meanwhile."""
    rng, fresh = random.Random(seed), itertools.count()
    requests: list[TraceRequest] = []

    def new(count: int) -> list[int]:
        return list(itertools.islice(fresh, count))

    def add(prompt: list[int], generated: list[int]) -> list[int]:
        blocks = prompt + generated
        at = float(len(requests))
        requests.append(TraceRequest(at, b"ns", 0, 16 * len(prompt) + 1, 16 * len(blocks) + 1, blocks))
        return blocks

    systems = [new(30) for _ in range(3)]
    sessions = [list(systems[user % 3]) for user in range(9)]
    for turn in range(200):
        user = rng.randrange(9)
        if rng.random() < 0.2:
            sessions[user] = list(systems[user % 3])
        sessions[user] = add(sessions[user] + new(3), new(2))
        if 100 <= turn < 110:
            for _ in range(10):
                add(new(30), new(1))
    return Trace(TraceHeader(16, 500, "00"), requests)


def test_the_default_beats_lru_on_the_recorded_run(recorded: dict[int, dict[str, Replayed]]) -> None:
    """At each pool size, and no policy passes the optimum; the gap is printed by the command."""
    assert list(recorded) == [546, 273, 136, 68]
    for size, row in recorded.items():
        assert row[DEFAULT].reused_tokens > row["lru"].reused_tokens, size
        assert max(row[name].reused_tokens for name in POLICIES) <= row[OPTIMUM].reused_tokens, size
        assert row[OPTIMUM].prompt_tokens == sum(request.prompt for request in read_trace(RECORDED).requests)


@pytest.mark.parametrize("seed", range(3))
def test_the_default_beats_lru_under_a_scan_burst(seed: int) -> None:
    """A burst of several pool sizes does not drive out what users go on with."""
    trace = scan_burst(seed)
    for size in (125, 250, 500):
        row = replay_all(trace, size)
        assert row[DEFAULT].reused_tokens > row["lru"].reused_tokens
        assert max(row[name].reused_tokens for name in POLICIES) <= row[OPTIMUM].reused_tokens


def test_a_replay_by_hand() -> None:
    """Three blocks of memory: the optimum keeps what returns, LRU what came last."""
    paths: Iterator[tuple[int, list[int]]] = enumerate([[1, 2], [3], [4], [1, 2], [3]])
    requests = [TraceRequest(float(at), b"ns", 0, 4 * len(path) + 1, 4 * len(path) + 1, path) for at, path in paths]
    trace = Trace(TraceHeader(4, 3, "00"), requests)
    assert replay_optimum(trace, 3) == Replayed(prompt_tokens=33, reused_tokens=8, evictions=None, too_long=0)
    assert replay(trace, POLICIES["lru"], 3) == Replayed(33, 4, 3, 0)
    assert replay_optimum(trace, 1) == replay(trace, POLICIES["lru"], 1)._replace(evictions=None)
    assert replay_optimum(trace, 1).too_long == 2
    assert replay_optimum(trace, 4).reused_tokens == 12


def test_the_command_prints_the_gap(
    capsys: pytest.CaptureFixture[str], recorded: dict[int, dict[str, Replayed]]
) -> None:
    """A line per pool size: every policy, the optimum, and what the default lacks to it."""
    assert main(["cache", "replay", RECORDED]) == 0
    out = capsys.readouterr().out
    assert out.startswith("317 requests, 197,713 prompt tokens, recorded with 546 blocks of 16 tokens\n")
    heading = next(line for line in out.splitlines() if "blocks  " in line)
    assert heading.split() == ["blocks", *POLICIES, OPTIMUM, "gap"]
    for size, row in recorded.items():
        [line] = [line for line in out.splitlines() if re.match(rf"\s+{size} ", line)]
        numbers = line.replace("*", " ").replace("%", " ").split()[1:7]
        rates = [100 * row[name].hit_rate for name in (*POLICIES, OPTIMUM)]
        assert numbers == [f"{rate:.1f}" for rate in (*rates, rates[-1] - rates[0])]
    assert "7 requests do not fit" in out
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert out.split("\n\nToken hit rates")[0] in readme, "the README shows another table"


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    """All numbers for programs, at the sizes asked for."""
    assert main(["cache", "replay", RECORDED, "--json", "--blocks", "300", "40"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["requests"], content["block_size"], content["recorded_blocks"]) == (317, 16, 546)
    assert [pool["blocks"] for pool in content["pools"]] == [300, 40]
    for pool in content["pools"]:
        assert set(pool) == {"blocks", *POLICIES, OPTIMUM}
        assert pool["lru"]["hit_rate"] == pool["lru"]["reused_tokens"] / pool["lru"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl"),
        ([__file__], "no trace of version 1"),
        ([RECORDED, "--blocks", "0"], "--blocks is 0: give at least 1"),
    ],
)
def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """One line, and exit status 1."""
    assert main(["cache", "replay", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
