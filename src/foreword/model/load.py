"""Reading a checkpoint directory: config.json and safetensors, sharded or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foreword.core.errors import ModelLoadError
from foreword.model.checkpoint_quantization import UNUSED_SUFFIXES
from foreword.model.config import ModelConfig
from foreword.model.decoder import Decoder
from foreword.model.digest import weight_files
from foreword.model.gguf import BLOCK_SUFFIXES
from foreword.model.rotary import RotaryTables
from foreword.ops import grouped
from foreword.ops.protocol import AttentionSpec, LayerWeights, QuantizedWeight
from foreword.ops.quantize import BLOCK_BYTES, GROUP, dequantize, joined, quantize

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.protocol import GroupedWeight, LinearOp, Ops, Quantization, Weight


def load_model(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    ops: Ops,
    quantization: Quantization | None = None,
    as_stored: bool = False,
    device: str = "cpu",
) -> Decoder:
    """Load the weights of ``directory``, converted to ``dtype`` or quantised, and packed by ``ops``.

    Blocks of the wanted scheme that a GGUF file held are used as they are. The head never has fewer than 8 bits: its
    errors reach the choice of the token directly.

    Args:
        as_stored: ``ops`` get the weights of a quantised checkpoint as they are; otherwise what they stand for, which
            is treated like the weights of any other.

    Raises:
        ModelLoadError: a file is missing, truncated or unreadable, or a tensor is missing, of another shape than
            ``config`` says, or unknown to the decoder. The message names the file, the tensor and the reason.
    """
    weights = _Weights(Path(directory), config, dtype, quantization, as_stored, device)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = weights.take("model.embed_tokens.weight", vocab, hidden, apart=True)
    rotary = RotaryTables(config.ropes, config.head_dim, config.max_position_embeddings, device)
    layers = [_layer(weights, config, ops, rotary, number) for number in range(config.num_layers)]
    final_norm = weights.norm("model.norm.weight", hidden, config)
    if config.tie_word_embeddings:
        weights.ignore("lm_head.weight")
        head = ops.linear(weights.head("model.embed_tokens.weight", embedding))
    else:
        head = ops.linear(weights.head("lm_head.weight", weights.take("lm_head.weight", vocab, hidden)))
    weights.finish()
    return Decoder(config, ops, embedding=embedding, layers=layers, rotary=rotary, final_norm=final_norm, head=head)


def stored_quantization(directory: Path) -> Quantization | None:
    """The scheme of most blocks that a converted GGUF checkpoint keeps; None if it keeps none.

    Raises:
        ModelLoadError: a file is missing or unreadable.
    """
    names = [name for file in weight_files(directory) for name in _open(file).keys()]  # noqa: SIM118 - not a mapping
    counts = {scheme: sum(name.endswith(suffix) for name in names) for scheme, suffix in BLOCK_SUFFIXES.items()}
    most = max(counts, key=lambda scheme: counts[scheme])
    return most if counts[most] else None


def _layer(weights: _Weights, config: ModelConfig, ops: Ops, rotary: RotaryTables, number: int) -> LayerWeights:
    prefix, rope = f"model.layers.{number}.", config.ropes[number]
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def fused(parts: dict[str, int], inputs: int, bias: bool) -> LinearOp:
        weight, joined_bias = weights.linear(parts, inputs, bias)
        try:
            return ops.linear(weight, joined_bias)
        except ValueError as error:
            raise ModelLoadError(f"{weights.directory}: {', '.join(parts)} cannot be used: {error}") from error

    def norm(name: str, size: int, present: bool = True) -> Tensor | None:
        return weights.norm(prefix + name + ".weight", size, config) if present else None

    qkv = {attention + "q_proj": query, attention + "k_proj": kv, attention + "v_proj": kv}
    mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return LayerWeights(
        attention=AttentionSpec(config.attention_scale, config.windows[number], config.attention_softcap),
        rotation=None if rope is None else rotary.tables[rope],
        qkv=fused(qkv, hidden, config.qkv_bias),
        output=fused({attention + "o_proj": hidden}, query, config.o_bias),
        gate_up=fused({mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, config.mlp_bias),
        down=fused({mlp + "down_proj": hidden}, inner, config.mlp_bias),
        attention_norm=weights.norm(prefix + "input_layernorm.weight", hidden, config),
        mlp_norm=weights.norm(prefix + mlp_norm + ".weight", hidden, config),
        attention_post_norm=norm("post_attention_layernorm", hidden, config.post_norms),
        mlp_post_norm=norm("post_feedforward_layernorm", hidden, config.post_norms),
        query_norm=norm("self_attn.q_norm", config.head_dim, config.qk_norm),
        key_norm=norm("self_attn.k_norm", config.head_dim, config.qk_norm),
    )


class _Weights:
    """The tensors of a checkpoint, each taken once."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        quantization: Quantization | None,
        as_stored: bool,
        device: str,
    ) -> None:
        self.directory = directory
        self._stored = config.quantization
        self._dtype = dtype
        self._quantization = quantization
        self._as_stored = as_stored
        self._device = device
        self._found_stored = False
        self._places: dict[str, tuple[Path, Any]] = {}
        for file in weight_files(directory):
            handle = _open(file)
            self._places.update((name, (file, handle)) for name in handle.keys())  # noqa: SIM118 - not a mapping

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def read(
        self, name: str, *shapes: tuple[int, ...], dtype: torch.dtype | None = None, apart: bool = False
    ) -> Tensor:
        """The tensor as the file has it; see :class:`foreword.model.checkpoint_quantization.TensorSource`.

        ``apart``: in a mapping of its own, so that the tensor, if it is kept, does not keep the pages of all others.
        """
        if name not in self._places:
            raise ModelLoadError(f"{self.directory}: tensor {name!r} is missing")
        file, handle = self._places.pop(name)
        found = tuple(handle.get_slice(name).get_shape())
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelLoadError(f"{file}: tensor {name!r} has shape {list(found)}, not {wanted}")
        tensor: Tensor = (_open(file) if apart else handle).get_tensor(name)
        if dtype is None and (not tensor.is_floating_point() or tensor.itemsize < 2):
            raise ModelLoadError(f"{file}: tensor {name!r} has dtype {tensor.dtype}; quantised weights are read where "
                                 "quantization_config of config.json says how, and in projections only")  # fmt: skip
        if dtype is not None and tensor.dtype != dtype:
            raise ModelLoadError(f"{file}: tensor {name!r} has dtype {tensor.dtype}, not {dtype}")
        return tensor.to(self._device)

    def take(self, name: str, *shape: int, apart: bool = False) -> Tensor:
        """The tensor in the wanted dtype; memory-mapped where the file holds that dtype."""
        return self.read(name, shape, apart=apart).to(self._dtype)

    def linear(self, parts: dict[str, int], inputs: int, bias: bool) -> tuple[Weight, Tensor | None]:
        """``weight [sum of parts, inputs]`` and bias of several projections of one input."""
        biases = [self.take(name + ".bias", size) for name, size in parts.items()] if bias else []
        joined_bias = _joined(biases) if biases else None
        shapes = {name: (size, inputs) for name, size in parts.items()}
        stored = {name: weight for name, shape in shapes.items() if (weight := self._grouped(name, shape)) is not None}
        in_groups = inputs % GROUP == 0
        as_stored = self._as_stored and in_groups and len(stored) == len(parts)
        if as_stored and (whole := grouped.joined(list(stored.values()))):
            return whole, joined_bias
        if (scheme := self._quantization) is None or not in_groups:
            plain = [self._numbers(name, shape, stored.get(name)) for name, shape in shapes.items()]
            return _joined(plain), joined_bias
        blocks = [self._quantized(name, shape, scheme, stored.get(name)) for name, shape in shapes.items()]
        return joined(blocks), joined_bias

    def head(self, name: str, weight: Tensor) -> Tensor | QuantizedWeight:
        """The output projection ``weight``, known as ``name``."""
        if self._quantization is None or weight.shape[1] % GROUP:
            return weight
        blocks = self._blocks(name, (weight.shape[0], weight.shape[1]), "int8")
        return blocks or self._quantize(name, weight, "int8")

    def _grouped(self, name: str, shape: tuple[int, int]) -> GroupedWeight | None:
        """The projection's weight, if the checkpoint has it quantised."""
        if self._stored is None:
            return None
        try:
            weight = self._stored.weight(name, shape, self)
            self._found_stored |= weight is not None
            return weight
        except ValueError as error:
            raise ModelLoadError(f"{self.directory}: {name} cannot be read: {error}") from error

    def _numbers(self, name: str, shape: tuple[int, int], stored: GroupedWeight | None) -> Tensor:
        return self.take(name + ".weight", *shape) if stored is None else dequantize(stored).to(self._dtype)

    def _quantized(
        self, name: str, shape: tuple[int, int], scheme: Quantization, stored: GroupedWeight | None
    ) -> QuantizedWeight:
        name += ".weight"
        if stored is not None:
            return self._quantize(name, dequantize(stored), scheme)
        blocks = self._blocks(name, shape, scheme)
        if blocks is None:
            return self._quantize(name, self.take(name, *shape), scheme)
        self.ignore(name)
        return blocks

    def _quantize(self, name: str, weight: Tensor, scheme: Quantization) -> QuantizedWeight:
        try:
            return quantize(weight, scheme)
        except ValueError as error:
            raise ModelLoadError(f"{self.directory}: tensor {name!r} cannot be quantised: {error}") from error

    def _blocks(self, name: str, shape: tuple[int, int], scheme: Quantization) -> QuantizedWeight | None:
        """The weight's blocks as the GGUF file had them, if it had them in that scheme."""
        name += BLOCK_SUFFIXES[scheme]
        if name not in self._places:
            return None
        file, handle = self._places[name]
        blocks: Tensor = handle.get_tensor(name)
        wanted = shape[0], shape[1] // GROUP * BLOCK_BYTES[scheme]
        if blocks.shape != wanted or blocks.dtype != torch.uint8:
            found = f"shape {list(blocks.shape)} and dtype {blocks.dtype}"
            raise ModelLoadError(f"{file}: tensor {name!r} has {found}, not {list(wanted)} bytes")
        return QuantizedWeight(scheme, blocks.to(self._device), shape)

    def norm(self, name: str, size: int, config: ModelConfig) -> Tensor:
        """A norm's weight. With an offset it stays in float32: in bfloat16 the sum would lose the weight's bits."""
        weight = self.take(name, size)
        return weight.float() + config.norm_offset if config.norm_offset else weight.clone()

    def ignore(self, name: str) -> None:
        self._places.pop(name, None)

    def finish(self) -> None:
        """Check that nothing that would change the results is left over."""
        if self._stored is not None and not self._found_stored:
            raise ModelLoadError(
                f"{self.directory}: config.json says quant_method={self._stored.method!r}, but no weight is quantised: "
                "take quantization_config out of it, or bring its weights"
            )
        unused = ("rotary_emb.inv_freq", *BLOCK_SUFFIXES.values(), *(UNUSED_SUFFIXES if self._stored else ()))
        for name, (file, handle) in self._places.items():
            # Programs that write GPTQ add a bias of zeros to every projection.
            if not name.endswith(unused) and not (name.endswith(".bias") and not handle.get_tensor(name).any()):
                raise ModelLoadError(f"{file}: tensor {name!r} is unknown to this architecture")


def _open(file: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # safetensors raises its own type, OSError and others
        raise ModelLoadError(f"{file}: no complete safetensors file: {error}") from error


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
