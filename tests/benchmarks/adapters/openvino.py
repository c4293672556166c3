"""OpenVINO GenAI: its continuous batching pipeline with prefix caching."""

from __future__ import annotations

from typing import Any

import numpy
import openvino
import openvino_genai

KV_GIB = 2


class Adapter:
    """Variants name the weights: GGUF files (``q4_1``, ``q8_0``) or an exported model (``int8``)."""

    packages = ("openvino-genai", "openvino")

    def __init__(self, variant: str, model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = 128
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.notes = (
            f"ContinuousBatchingPipeline of {variant} weights, KV {KV_GIB} GiB, prefix cache, "
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens}, {threads} threads"
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.ignore_eos = True
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(prompts))
        return [{"token_ids": list(result.m_generation_ids[0])} for result in results]

    def reset(self) -> None:
        """The pipeline has no call for it; prompts are new in every run."""
