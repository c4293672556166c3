"""Importing an adapter and making a model cost nothing: torch and the engine come with the first call."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = "[name for name in ('torch', 'transformers', 'foreword.engine.engine') if name in sys.modules]"


@pytest.mark.parametrize(
    "make",
    [
        "from langchain_foreword import ChatForeword, __version__; models = [ChatForeword(temperature=0)] * 10",
        "from langchain_foreword import ForewordLLM; repr(ForewordLLM(model='some/where', engine_options={'seed': 1}))",
        "from llama_index.llms.foreword import Foreword; repr(Foreword(temperature=0)); Foreword().to_payload()",
    ],
)
def test_constructing_a_model_loads_neither_torch_nor_the_engine(make: str) -> None:
    program = f"import sys\n{make}\nprint({HEAVY})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_importing_the_langchain_package_imports_no_submodule() -> None:
    program = "import sys, langchain_foreword\nprint('langchain_core' in sys.modules, langchain_foreword.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[0] == "False"


def test_llama_index_namespace_stays_a_namespace() -> None:
    import llama_index
    import llama_index.llms

    assert llama_index.__file__ is None
    assert llama_index.llms.__file__ is None
