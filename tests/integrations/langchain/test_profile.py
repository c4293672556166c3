"""The profile, which LangChain's middleware reads before the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from langchain_foreword import ChatForeword

if TYPE_CHECKING:
    from pathlib import Path

    from foreword import Engine


@pytest.mark.usefixtures("real_engine")
def test_profile(engine: Engine) -> None:
    given = ChatForeword(engine=engine)
    assert given.profile["max_input_tokens"] == given.profile["max_output_tokens"] == 8192
    lazy = ChatForeword()
    assert lazy._handle.loaded(lazy.model) is None
    assert lazy.profile == given.profile  # the model's files are there to read
    lazy.get_engine()
    assert lazy.profile == given.profile
    lazy.close()
    assert ChatForeword(engine_options={"max_model_len": 512}).profile["max_input_tokens"] == 512
    own = ChatForeword(engine=engine, profile={"max_input_tokens": 5})
    own.get_engine()
    assert own.profile == {"max_input_tokens": 5}


def test_profile_of_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched for a profile, and what is wrong with them is for the first call to say."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    for model in ("smollm2-135m", "org/name", "no such model", str(tmp_path / "broken"), str(tmp_path)):
        assert "max_input_tokens" not in ChatForeword(model=model).profile
    assert [file.name for file in tmp_path.iterdir()] == ["broken"]


def test_profile_of_a_directory(tiny_dir: Path) -> None:
    assert ChatForeword(model=str(tiny_dir)).profile["max_input_tokens"] == 2048


@pytest.mark.usefixtures("real_engine")  # its files lie ready then
def test_langchains_summarization_takes_a_share_of_the_context() -> None:
    """It reads the profile when it is made, before anything is loaded."""
    from langchain.agents.middleware import SummarizationMiddleware

    assert SummarizationMiddleware(ChatForeword(), trigger=("fraction", 0.8)).trigger == ("fraction", 0.8)
