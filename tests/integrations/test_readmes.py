"""The code of both READMEs runs as printed, top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

INTEGRATIONS = Path(__file__).parents[2] / "integrations"


@pytest.mark.parametrize("name", ["langchain", "llama-index"])
@pytest.mark.usefixtures("real_engine", "cold")
def test_readme_code_runs(
    name: str, capsys: pytest.CaptureFixture[str], idle: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "llama-index":
        from llama_index.core import Settings

        for attribute in ("_llm", "_tokenizer", "_callback_manager"):  # the README sets the process's defaults
            monkeypatch.setattr(Settings, attribute, getattr(Settings, attribute))
    blocks = re.findall(r"```python\n(.*?)```", (INTEGRATIONS / name / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 8
    program = compile("\n".join(blocks), f"{name}/README.md", "exec")
    exec(program, {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "Tokyo" in printed
    idle()
