"""From a GGUF file to a Hugging Face style checkpoint directory, so that everything after reads one format only."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foreword.core.errors import ModelLoadError
from foreword.model.gguf_config import ROPE_FACTORS, describe_config, rope_from_factors
from foreword.text.gguf_tokenizer import GGUFTokenizer, build_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.protocol import Quantization

FORMAT_VERSION = 2
"""Raise it when what is written changes: older conversions are then made anew."""

MARKER = "foreword.json"
SHARD_BYTES = 4 * 2**30

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

BLOCK_SUFFIXES: dict[Quantization, str] = {"int4": ".q4_1", "int8": ".q8_0"}
"""Of tensors that hold a weight's blocks as the file had them, beside the bfloat16 weight."""

KEPT_TYPES = {"Q4_1": BLOCK_SUFFIXES["int4"], "Q8_0": BLOCK_SUFFIXES["int8"]}
"""Their suffixes by the GGUF type of the blocks."""

Progress = Callable[[Iterator[Any], int], Iterator[Any]]
"""Wraps an iterator of known length, for example to show a bar."""


class GGUFFile(NamedTuple):
    """An opened GGUF file: metadata as plain values, tensors as the reader gives them (mapped, packed)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]


def open_gguf(path: Path) -> GGUFFile:
    """Read the metadata and the index of tensors.

    Raises:
        ModelLoadError: no GGUF file, or a truncated or damaged one.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    except Exception as error:  # damaged bytes make the reader fail in any way there is
        reason = "it does not begin like one" if "magic" in str(error) else f"truncated or damaged ({error})"
        raise ModelLoadError(f"{path} is no GGUF file that can be read: {reason}") from error


def convert(path: Path, target: Path, *, digest: str, progress: Progress | None = None) -> None:
    """Write the checkpoint directory ``target`` from the GGUF file ``path``; it appears complete or not at all.

    Weights become bfloat16; blocks that quantised engines use as they are (``KEPT_TYPES``) are written beside them.
    The caller sees to it that only one process converts to ``target`` at a time.

    Args:
        digest: identifies the source file; kept in the marker, see :func:`is_converted`.

    Raises:
        ModelLoadError: the file cannot be read, or its architecture, tokenizer or tensors are not supported.
    """
    file = open_gguf(path)
    config = _config(file)
    tokenizer = build_tokenizer(file.metadata, str(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        _write_weights(file, config, partial, progress)
        _write_tokenizer(tokenizer, file.metadata, config, partial)
        _write_json(partial / "config.json", config)
        _write_json(partial / MARKER, {"format": FORMAT_VERSION, "source_digest": digest, "source": str(path)})
        if target.exists():  # an older format or a damaged copy
            old = partial.with_suffix(".old")
            os.replace(target, old)
            shutil.rmtree(old, ignore_errors=True)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_converted(target: Path, digest: str | None = None) -> bool:
    """Whether ``target`` holds a conversion in the present format, of the source with ``digest`` if one is given."""
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return marker.get("format") == FORMAT_VERSION and digest in (None, marker.get("source_digest"))


def checkpoint_name(name: str) -> str | None:
    """The Hugging Face name of the GGUF tensor ``name``; None if there is none."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        return _OTHER_NAMES.get(name)
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else None


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo the row order that GGUF gives query and key projections of Llama models. ``weight [heads * D, ...]``.

    GGUF interleaves the two halves of each head, as its rotary embedding turns neighbouring pairs; checkpoints
    keep the halves apart.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """Tensor shapes in the order of PyTorch; GGUF lists the innermost dimension first."""
    return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in file.tensors.items()}


def _config(file: GGUFFile) -> dict[str, Any]:
    config = describe_config(file.metadata, _shapes(file), str(file.path))
    if ROPE_FACTORS in file.tensors:
        factors = file.tensors[ROPE_FACTORS].data.tolist()
        config["rope_scaling"] = rope_from_factors(factors, config["rope_theta"], config["head_dim"], str(file.path))
    return config


def _tensors(file: GGUFFile, name: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the checkpoint holds of the tensor ``name``: its weights in bfloat16, and its blocks where they are kept."""
    import torch

    from foreword.model.gguf_unpack import unpack

    source, target = file.tensors[name], str(checkpoint_name(name))
    try:
        weights = {target: unpack(source)}
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ModelLoadError(f"{file.path}: tensor {name} cannot be unpacked: {error}") from error
    kept = KEPT_TYPES.get(source.tensor_type.name)
    if kept and weights[target].dim() == 2:
        weights[target + kept] = torch.from_numpy(source.data.copy()).reshape(len(weights[target]), -1)
    if config["model_type"] == "llama" and (match := re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", name)):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        weights = {key: unpermute(weight, heads) for key, weight in weights.items()}
    return {
        key: (weight if weight.dtype == torch.uint8 else weight.to(torch.bfloat16)).contiguous()
        for key, weight in weights.items()
    }


def _write_weights(file: GGUFFile, config: Mapping[str, Any], target: Path, progress: Progress | None) -> None:
    """Write model.safetensors, or numbered shards and their index when there is more than ``SHARD_BYTES``."""
    from safetensors.torch import save_file

    names = {name: checkpoint_name(name) for name in file.tensors if name != ROPE_FACTORS}
    if unknown := sorted(name for name, renamed in names.items() if renamed is None):
        raise ModelLoadError(f"{file.path} holds tensors that {config['model_type']} models do not have: {unknown[:5]}")
    shards = _shards(file, names)
    steps: Iterator[str] = iter([name for shard in shards for name in shard])
    steps = progress(steps, len(names)) if progress else steps
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        label = "model" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}"
        weights = {key: weight for _ in shard for key, weight in _tensors(file, next(steps), config).items()}
        save_file(weights, target / f"{label}.safetensors", metadata={"format": "pt"})
        where.update(dict.fromkeys(weights, f"{label}.safetensors"))
    next(steps, None)  # lets a progress bar close
    if len(shards) > 1:
        _write_json(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def _shards(file: GGUFFile, names: Mapping[str, str | None]) -> list[list[str]]:
    """Tensor names in groups of at most ``SHARD_BYTES``, as nothing larger should have to fit in memory."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = 2 * int(file.tensors[name].n_elements) + int(file.tensors[name].n_bytes)
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _write_tokenizer(
    tokenizer: GGUFTokenizer, metadata: Mapping[str, Any], config: Mapping[str, Any], target: Path
) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer.backend.save(str(target / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        **tokenizer.special_tokens,
    }
    if template := metadata.get("tokenizer.chat_template"):
        options["chat_template"] = template
    _write_json(target / "tokenizer_config.json", options)
    ends = tokenizer.eos_token_ids
    generation = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    _write_json(target / "generation_config.json", generation | ({} if pad is None else {"pad_token_id": pad}))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
