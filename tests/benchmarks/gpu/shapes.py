"""Models that are measured: their shapes, what a decoding step must read, and checkpoints with random weights."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

POSITIONS = 40960
"""Longest sequence of every model: room for 32,768 tokens and what is generated behind them."""
_LAYERS_OF_A_SHARD = 8
BYTES_OF_WEIGHT = {"bfloat16": 2.0, "float32": 4.0, "int4": 20 / 32, "int8": 34 / 32}
"""Of one weight of a matrix, scales included: 32 of 4 bits with two 16-bit numbers, of 8 bits with one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family; ``tied``: the output projection is the embedding; ``biased``: that of Qwen2."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    biased: bool = False

    def tensors(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Shard, name and shape of each tensor of a checkpoint."""
        last = (self.layers - 1) // _LAYERS_OF_A_SHARD
        yield 0, "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for number in range(self.layers):
            for name, shape in self._layer():
                yield number // _LAYERS_OF_A_SHARD, f"model.layers.{number}.{name}", shape
        yield last, "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield last, "lm_head.weight", (self.vocabulary, self.hidden)

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "input_layernorm.weight", (self.hidden,)
        yield "post_attention_layernorm.weight", (self.hidden,)
        for name, size in (("q", query), ("k", kv), ("v", kv)):
            yield f"self_attn.{name}_proj.weight", (size, self.hidden)
            if self.biased:
                yield f"self_attn.{name}_proj.bias", (size,)
        yield "self_attn.o_proj.weight", (self.hidden, query)
        yield "mlp.gate_proj.weight", (self.inner, self.hidden)
        yield "mlp.up_proj.weight", (self.inner, self.hidden)
        yield "mlp.down_proj.weight", (self.hidden, self.inner)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, _, shape in self.tensors())

    @property
    def kv_bytes_per_token(self) -> int:
        """In 16 bits."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def products(self) -> list[tuple[int, int]]:
        """``(out, in)`` of a layer's products as they are carried out."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = [(2 * self.inner, self.hidden), (self.hidden, self.inner)]
        return [(query + 2 * kv, self.hidden), (self.hidden, query), *mlp]

    def read_bytes(self, scheme: str = "bfloat16") -> int:
        """Bytes of weights that a decoding step reads: all but the embedding, of which it looks up rows, unless that is
        the output projection too. With 4-bit weights the output projection has 8 bits, as the engine makes it."""
        matrices = self.layers * sum(out * inputs for out, inputs in self.products())
        head = self.vocabulary * self.hidden * BYTES_OF_WEIGHT["int8" if scheme == "int4" else scheme]
        return int(matrices * BYTES_OF_WEIGHT[scheme] + head)

    def step_bytes(self, sequences: int = 0, context: float = 0, scheme: str = "bfloat16") -> float:
        """Bytes that a decoding step must read, weights and KV in 16 bits: the floor, times the bandwidth."""
        return self.read_bytes(scheme) + sequences * context * self.kv_bytes_per_token

    def save(self, directory: Path, dtype: str, device: torch.device | str) -> Path:
        """A checkpoint with random weights, drawn on ``device``, unless ``directory`` has it already.

        Raises:
            OSError: there is not so much room.
        """
        import torch
        from safetensors.torch import save_file

        index = directory / "model.safetensors.index.json"
        if index.exists():  # it is written last
            return directory
        directory.mkdir(parents=True, exist_ok=True)
        size, free = int(self.parameters * BYTES_OF_WEIGHT[dtype]), shutil.disk_usage(directory).free
        if size > free:
            raise OSError(f"{directory}: the checkpoint takes {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
                          "name another folder with TMPDIR")  # fmt: skip
        (directory / "config.json").write_text(json.dumps(self._config(dtype), indent=1))
        support("support").save_byte_tokenizer(directory)
        generator = torch.Generator(device).manual_seed(0)
        places: dict[str, str] = {}
        count = (self.layers - 1) // _LAYERS_OF_A_SHARD + 1
        for shard, members in groupby(self.tensors(), key=lambda each: each[0]):
            tensors = {}
            for _, name, shape in members:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                is_norm = name.endswith("norm.weight")
                tensors[name] = (tensor.fill_(1.0) if is_norm else tensor.normal_(0, 0.02, generator=generator)).cpu()
            file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
            save_file(tensors, directory / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
        index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
        return directory

    def _config(self, dtype: str) -> dict[str, object]:
        return {
            "architectures": ["Qwen2ForCausalLM" if self.biased else "LlamaForCausalLM"],
            "model_type": "qwen2" if self.biased else "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": POSITIONS,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "torch_dtype": dtype,
        }


SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "1.5b": Shape(28, 1536, 8960, 12, 2, 128, 151936, tied=True, biased=True),
    "135m": Shape(30, 576, 1536, 9, 3, 64, 49152, tied=True),
    "tiny": Shape(2, 64, 128, 4, 2, 16, 512),
}
"""Of Llama-3.1-8B, Qwen2.5-1.5B and SmolLM2-135M, and one for rehearsals."""


def support(name: str) -> Any:
    """A module of the tests' own, wherever they are imported from."""
    tests = str(Path(__file__).parents[2])
    if tests not in sys.path:
        sys.path.append(tests)
    return importlib.import_module(name)
