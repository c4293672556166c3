"""transformers on the same checkpoint and prompts: ``generate`` over static batches, and continuous batching."""

from __future__ import annotations

import gc
import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .device import Device

Prompts = list[list[int]]


class Transformers:
    """Its model, with torch's own attention (SDPA), in 16 bits, greedy, past the end of sequence.

    Attributes:
        batch: prompts that :meth:`generate` ran at once.
    """

    def __init__(self, directory: Path, device: Device) -> None:
        from transformers import AutoModelForCausalLM

        self._device = device
        self._keeps_attention = False
        self.batch = 0
        dtype = torch.float32 if device.rehearsal else torch.bfloat16
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self.model = loaded.to(device.name).eval()
        self.model.generation_config = _greedy(eos_token_id=None)
        self.model.config.eos_token_id = None  # of random weights any token comes as soon as another

    def generate(self, prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        """Seconds, and what came out; all prompts at once, or as many as the memory holds."""
        self.batch = len(prompts)
        while True:
            try:
                begin = time.perf_counter()
                outputs = []
                for start in range(0, len(prompts), self.batch):
                    outputs += self._generate(prompts[start : start + self.batch], tokens)
                return time.perf_counter() - begin, outputs
            except torch.OutOfMemoryError:
                if self.batch == 1:
                    raise
            self.batch = -(-self.batch // 2)  # outside of the handler, whose error keeps the tensors
            self._free()

    @torch.inference_mode()
    def _generate(self, prompts: Prompts, tokens: int) -> Prompts:
        """All of one length, so nothing is padded."""
        ids = torch.tensor(prompts, device=self._device.name)
        result = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens)
        found: Prompts = result[:, ids.shape[1] :].tolist()
        return found

    def generate_batch(self, prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        """Seconds, and what came out. Its manager stays from one call to the next, where it can: making it is not work
        on the prompts.

        Raises:
            AttributeError: this version has none.
        """
        self._free()  # it takes what is free for its cache
        options: dict[str, Any] = {"inputs": prompts, "max_new_tokens": tokens}
        options["generation_config"] = _greedy(eos_token_id=-1, max_new_tokens=tokens)
        known = inspect.signature(self.model.generate_batch).parameters
        if "persistent_manager" in known:
            options["persistent_manager"] = True
        if self._keeps_attention and "continuous_batching_config" in known:
            options["continuous_batching_config"] = self._without_flash()
        begin = time.perf_counter()
        try:
            results = self.model.generate_batch(**options)
        except Exception as error:  # it may want other attention, which it would have to download
            if self._keeps_attention:
                raise
            print(f"- continuous batching with the attention that it prefers: {error!r:.200}", flush=True)
            self._keeps_attention = True
            return self.generate_batch(prompts, tokens)
        seconds = time.perf_counter() - begin
        return seconds, [list(result.generated_tokens) for result in results.values()]

    @staticmethod
    def _without_flash() -> Any:
        from transformers import ContinuousBatchingConfig

        return ContinuousBatchingConfig(auto_switch_to_flash=False)

    def close(self) -> None:
        destroy = getattr(self.model, "destroy_cached_continuous_batching_manager", None)
        if destroy is not None:
            destroy()
        del self.model
        self._free()

    def _free(self) -> None:
        gc.collect()
        if not self._device.rehearsal:
            torch.cuda.empty_cache()


def _greedy(**options: Any) -> Any:
    import transformers

    config: Any = transformers.GenerationConfig
    return config(do_sample=False, pad_token_id=0, **options)
