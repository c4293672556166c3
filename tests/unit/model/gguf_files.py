"""Tiny models as GGUF files, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 2, 16, 64, 48


def tiny_model(arch: str, tied: bool = False, rope: dict[str, Any] | None = None) -> Any:
    """A random model whose weights are exact in bfloat16, so that converting loses nothing."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(
        arch,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 1000.0},
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which would otherwise be 0 and 1
            parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16())
    return model


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """How GGUF writers order the rows of query and key weights of Llama models: row 2i is i, row 2i + 1 is D/2 + i."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def write_gguf(file: Path, arch: str, model: Any = None, kind: Any = None, **metadata: Any) -> Path:
    """The model as a GGUF file, with a small tokenizer; ``metadata`` with the value None is left out.

    Matrices are stored in the format ``kind``; None: in float32.
    """
    writer = gguf.GGUFWriter(file, arch)
    entries: dict[str, Any] = {
        "block_count": 2,
        "context_length": 131072,
        "embedding_length": HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "rope.freq_base": 1000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    for key, value in (entries | metadata).items():
        add = (
            writer.add_float32
            if isinstance(value, float)
            else writer.add_string
            if isinstance(value, str)
            else writer.add_uint32
        )
        if value is not None:
            add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<|im_start|>", "<|im_end|>", "AB", *map(chr, range(ord("A"), ord("A") + VOCAB - 3))])
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(1)
    for name, tensor in [] if model is None else model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if arch == "llama" and (".q_proj" in name or ".k_proj" in name):
            data = interleave(data, HEADS if ".q_proj" in name else KV_HEADS)
        for long, short in NAMES.items():
            name = name.replace(long, short)
        if kind is not None and data.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    if model is not None and model.config.rope_parameters["rope_type"] == "llama3":
        factors = model.model.rotary_emb.inv_freq  # what is left of the parameters in such files
        plain = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        writer.add_tensor("rope_freqs.weight", (plain / factors).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
