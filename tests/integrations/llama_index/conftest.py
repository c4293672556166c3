"""What the LlamaIndex tests share: the LLM, the process's settings, an embedding model, events."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core import Document, Settings
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler

from llama_index.llms.foreword import Foreword

if TYPE_CHECKING:
    from foreword import Engine

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="session")
def embed_model() -> BaseEmbedding:
    """The examples' embedding model."""
    spec = spec_from_file_location("examples_embedding", EXAMPLES / "embedding.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MiniLM(embed_batch_size=32)


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    paths = sorted((EXAMPLES / "documents").glob("*.txt"))
    return [Document(text=path.read_text(), metadata={"name": path.stem}) for path in paths]


@pytest.fixture
def llm(engine: Engine) -> Foreword:
    return Foreword(engine=engine, temperature=0, max_tokens=12)


@pytest.fixture
def settings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Foreword:
    """LlamaIndex's process-wide settings with an LLM on the engine, undone after the test. Gives the LLM."""
    llm = Foreword(engine=engine, temperature=0, max_tokens=14)
    for name in ("_llm", "_tokenizer", "_node_parser", "_callback_manager", "_prompt_helper"):
        monkeypatch.setattr(Settings, name, getattr(Settings, name))
    Settings.llm = llm
    Settings.tokenizer = engine.encode
    return llm


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What LlamaIndex's instrumentation reports during the test."""
    seen: list[Any] = []

    class Handler(BaseEventHandler):
        def handle(self, event: Any, **_: Any) -> None:
            seen.append(event)

    handler, dispatcher = Handler(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield seen
    dispatcher.event_handlers.remove(handler)
