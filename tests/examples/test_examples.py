"""What a reader copies runs as printed: the README's programs and the examples."""

import ast
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(*arguments: str, cwd: Path) -> str:
    """Standard output of a fresh interpreter; a failure shows what it printed."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def program(importing: str) -> str:
    (found,) = [text for text in PROGRAMS if importing in text]
    return found


BORDER = "-- the next program --"
RUN_EACH = f"""
import json, sys
for text in json.load(sys.stdin):
    exec(compile(text, "README.md", "exec"), {{"__name__": "__main__"}})
    print({BORDER!r})
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What each of the README's programs prints. They run one after the other in one fresh interpreter, as imports and
    loading take most of the time; each starts from its own names, and the last two share theirs, as they are read."""
    ways = {
        "langchain_foreword": program("langchain_foreword"),
        "llama_index.llms.foreword": program("llama_index.llms.foreword"),
        "from foreword import Engine, SamplingParams": program("from foreword import Engine, SamplingParams"),
        "engine.warm(": program("engine.warm("),
        "structured={": program("structured={") + program("get_weather"),
    }
    command, texts, cwd = (
        [sys.executable, "-c", RUN_EACH],
        json.dumps(list(ways.values())),
        tmp_path_factory.mktemp("a"),
    )
    done = subprocess.run(command, input=texts, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split(BORDER + "\n")[:-1]
    return dict(zip(ways, outputs, strict=True)).__getitem__


def test_the_first_screen_shows_both_commands_and_both_programs() -> None:
    first_screen = "\n".join(README.splitlines()[:50])
    assert "make demo" in first_screen
    assert "make test" in first_screen
    for importing in ("langchain_foreword", "llama_index.llms.foreword"):
        lines = [line for line in program(importing).splitlines() if line.strip()]
        assert len(lines) <= 10
        assert program(importing) in first_screen


def test_langchain_program(printed: Callable[[str], str]) -> None:
    out = printed("langchain_foreword")
    answers = out.splitlines()
    assert "Paris" in out
    assert "Tokyo" in out
    assert "'cache_read': 0" in answers[0]
    assert int(re.search(r"'cache_read': (\d+)", answers[-1]).group(1)) > 10


def test_llama_index_program(printed: Callable[[str], str]) -> None:
    out = printed("llama_index.llms.foreword")
    assert "330 metres" in out
    assert "Gustave Eiffel" in out


def test_engine_program(printed: Callable[[str], str]) -> None:
    out = printed("from foreword import Engine, SamplingParams")
    (cold, _), (reused, prompt) = re.findall(r"(\d+) of (\d+) prompt tokens were reused", out)
    assert "Tokyo" in out
    assert cold == "0"
    assert 0 < int(reused) < int(prompt)


def test_cache_program(printed: Callable[[str], str]) -> None:
    """What was warmed is pinned and found, and what was forked is three texts."""
    warmed, *explained, branches = printed("engine.warm(").splitlines()
    (tokens,) = {int(count) for count in re.findall(r"(?:prompt|pinned)_tokens=(\d+)", warmed)}
    assert explained[0].startswith(f"{tokens} of ")
    assert len(ast.literal_eval(branches)) == 3


def test_every_program_is_tested() -> None:
    assert len(PROGRAMS) == 6


def test_demo(tmp_path: Path) -> None:
    """The main job: real answers, and a table in which each beginning is computed once."""
    out = run(str(ROOT / "examples" / "demo.py"), cwd=tmp_path)
    assert "November 19, 1863" in out
    rows = [line for line in out.splitlines() if re.match(r"(LangChain|LlamaIndex) \w+: .*\d ms", line)]
    counts = [[int(n.replace(",", "")) for n in re.findall(r"(?<=  )[\d,]+(?=  )", row)[:3]] for row in rows]
    assert len(rows) == 15
    assert all(prompt == cached + computed for prompt, cached, computed in counts)
    first_chat, *others = counts[3:]
    assert first_chat[2] > 1000
    assert all(computed < 40 for _, _, computed in others)  # nobody computed the documents again, LlamaIndex neither


@pytest.mark.parametrize("command", [[], ["demo"], ["chat"], ["generate"], ["explain"], ["models"]])
def test_help_teaches(command: list[str], tmp_path: Path) -> None:
    assert "foreword" in run("-m", "foreword.cli", *command, "--help", cwd=tmp_path)


def test_generate_command(tmp_path: Path) -> None:
    out = run("-m", "foreword.cli", "generate", "--chat", "Which city is the capital of Japan?", cwd=tmp_path)
    assert "Tokyo" in out


def test_models_command(tmp_path: Path) -> None:
    out = run("-m", "foreword.cli", "models", cwd=tmp_path)
    assert "smollm2-135m" in out
    assert "weights are kept under" in out


def test_chat_command_shows_what_each_turn_reused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "What is the capital of France? Answer briefly.\nAnd of Japan?\n/reset\nHello\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", "--temperature", "0", "--max-tokens", "16"]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out
    reused = [int(count) for count in re.findall(r"\[(\d+) of \d+ prompt tokens reused", out)]
    assert len(reused) == 3
    assert reused[1] > 40  # the first turn, its answer included


def test_a_wrong_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(tmp_path / "nothing"), "hello"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("foreword: ")
    assert said.count("\n") == 1


def test_structured_output_and_tools_programs(printed: Callable[[str], str]) -> None:
    """The second goes on with the first one's engine, and checks itself that the call was not computed again."""
    out = printed("structured={")
    described, choice, call = out.splitlines()
    assert json.loads(described).keys() == {"city", "population", "languages"}
    assert choice in ("coastal", "inland")
    assert call.startswith("get_weather {'city': ")
