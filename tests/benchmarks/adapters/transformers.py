"""transformers: ``generate`` over static batches. All prompts of a workload are of one length, so nothing is padded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

BATCH = 25
"""Prompts per call: a hundred caches at once need more memory than the machine has."""


class Adapter:
    """Variants: ``bf16`` and ``fp32``. There is no cache across calls."""

    packages = ("transformers", "torch")

    def __init__(self, variant: str, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        dtype = torch.float32 if variant == "fp32" else torch.bfloat16
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.notes = f"generate() in {variant}, static batches of at most {BATCH}, {threads} threads"

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        outputs = []
        for start in range(0, len(prompts), BATCH):
            ids = torch.tensor(prompts[start : start + BATCH])
            with torch.inference_mode():
                sequences = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    min_new_tokens=max_tokens,
                    pad_token_id=0,
                )
            outputs += [{"token_ids": row, "cached_tokens": 0} for row in sequences[:, ids.shape[1] :].tolist()]
        return outputs

    def reset(self) -> None:
        """Nothing is kept."""
