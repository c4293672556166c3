"""llama.cpp through the high-level class of llama-cpp-python: one sequence, whose beginning it keeps."""

from __future__ import annotations

from typing import Any

import llama_cpp


class Adapter:
    """Variants name the weights: ``q4_0``, ``q4_1``, ``q8_0``. The class has no batches: prompts go one by one."""

    packages = ("llama-cpp-python",)

    def __init__(self, variant: str, model: str, threads: int) -> None:
        self._llama = llama_cpp.Llama(
            model, n_ctx=8192, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
        )
        self.notes = f"Llama({variant}, flash_attn=True).generate, one sequence at a time, {threads} threads"

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        return [self._complete(prompt, max_tokens) for prompt in prompts]

    def reset(self) -> None:
        self._llama.reset()

    def _complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        held = self._llama.input_ids[: self._llama.n_tokens].tolist()
        same = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
        )
        token_ids = []
        for token in self._llama.generate(prompt, temp=0.0, reset=True):
            token_ids.append(int(token))
            if len(token_ids) == max_tokens:
                break
        return {"token_ids": token_ids, "cached_tokens": min(same, len(prompt) - 1)}
