"""The config.json of the model that a GGUF file holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foreword.core.errors import ModelLoadError

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that some Llama 3 files carry in place of the scaling's parameters."""


def describe_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Any]:
    """The config as transformers reads it.

    Args:
        metadata: the file's metadata, plain values by key.
        shapes: tensor shapes by GGUF name, outermost dimension first.
        where: the file, for messages.

    Raises:
        ModelLoadError: the architecture or one of its features is not supported, or a needed entry is missing.
    """
    arch = metadata.get("general.architecture")
    if arch not in _CLASSES:
        raise ModelLoadError(f"{where} has the architecture {arch!r}: supported in GGUF are {', '.join(_CLASSES)}")

    def need(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None or isinstance(value, list):  # lists are values by layer, which no supported model has
            problem = "is missing" if value is None else "differs between layers, which is not supported"
            raise ModelLoadError(f"{where}: {arch}.{key} {problem}")
        return value

    if metadata.get(f"{arch}.expert_count"):
        raise ModelLoadError(f"{where} is a mixture of experts ({arch}.expert_count): this is not supported")
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{where} holds no tensor token_embd.weight")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden // heads)
    rotated = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim or metadata.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(
            f"{where} rotates {rotated} of {head_dim} dimensions or has odd value heads: not supported"
        )
    ends = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": need("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in shapes,
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_theta": _shortest(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, shapes, where),
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": "bfloat16",
        **ends,
    }


def llama3_factors(theta: float, head_dim: int, factor: float, original: int = 8192) -> list[float]:
    """By how much Llama 3's scaling slows each of the ``head_dim / 2`` rotary frequencies.

    Wavelengths above ``original`` positions are stretched by ``factor``, those below a quarter of it stay, and
    between the two the frequency is interpolated.
    """
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(1.0, max(0.0, (original / wavelength - 1) / (4 - 1)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def rope_from_factors(factors: list[float], theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """The ``rope_scaling`` of a Llama 3 model whose file only carries the resulting ``factors``.

    Raises:
        ModelLoadError: Llama 3's scaling does not lead to these factors.
    """
    factor = float(round(max(factors), 3))
    expected = llama3_factors(theta, head_dim, factor)
    if len(factors) != len(expected) or any(
        not math.isclose(ours, theirs, rel_tol=1e-3) for ours, theirs in zip(expected, factors, strict=True)
    ):
        raise ModelLoadError(f"{where}: the factors in {ROPE_FACTORS} are not those of Llama 3's RoPE scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _rope_scaling(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Any] | None:
    """What the metadata say; for a file with a tensor of factors see :func:`rope_from_factors`."""
    arch = metadata["general.architecture"]
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = metadata.get(f"{arch}.rope.scaling.factor", 1.0)
    if kind == "none" or ROPE_FACTORS in shapes:
        return None
    if kind != "linear":
        raise ModelLoadError(f"{where}: the RoPE scaling {kind!r} is not supported; none and linear are")
    return {"rope_type": kind, "factor": _shortest(factor)}


def _shortest(value: float) -> float:
    """The decimal number that was meant by a float32, for example 1e-05 and not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
