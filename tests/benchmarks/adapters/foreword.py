"""Foreword: the engine itself, several prompts as one batch."""

from __future__ import annotations

from typing import Any

from foreword import Engine


class Adapter:
    """Variants: ``bf16``, ``fp32`` and ``auto`` choose the dtype; ``int8`` and ``int4`` quantise the weights."""

    packages = ("foreword", "torch", "tokenizers")

    def __init__(self, variant: str, model: str, threads: int) -> None:
        dtypes = {"bf16": "bfloat16", "fp32": "float32"}
        options: dict[str, Any] = {
            "dtype": dtypes.get(variant, "auto"),
            "kv_cache_memory": "2GiB",
            "num_threads": threads,
        }
        if variant in ("int8", "int4"):
            options["quantization"] = variant
        self._engine = Engine(model, **options)
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        self.notes = f"Engine({said}): {self._engine.backend}"

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        outputs = self._engine.generate(prompts, max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return [
            {
                "token_ids": output.token_ids,
                "cached_tokens": output.usage.cached_tokens,
                "error": None if output.error is None else str(output.error),
            }
            for output in outputs
        ]

    def reset(self) -> None:
        self._engine.reset_prefix_cache()
