"""What a checkpoint's config.json says about the decoder, in one form for all architectures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.core.errors import ModelLoadError
from foreword.model.checkpoint_quantization import CheckpointQuantization
from foreword.ops.protocol import Activation

_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "attention_bias": False,
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "Gemma2ForCausalLM": {
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Gemma3ForCausalLM": {
        "max_position_embeddings": 131072,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "SmolLM3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
}
"""Supported architectures, and the defaults a config.json may leave out where they differ from ``_COMMON``."""

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_REFUSED = (
    "is_encoder_decoder",
    "use_bidirectional_attention",
    "num_local_experts",
    "num_experts",
    "add_cross_attention",
)
"""Options that change the mathematics and that the decoder does not know."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a layer.

    Attributes:
        theta: base of the wavelengths.
        scaling: "default", "linear" (all frequencies divided by ``factor``) or "llama3" (the low ones only).
        original_max_position: context the model was trained with before scaling, in tokens.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The decoder's switches. Sizes are in elements, windows and positions in tokens.

    Attributes:
        norm_offset: added to norm weights: 1 in Gemma.
        post_norms: also normalise what attention and MLP return, before the residual is added.
        embedding_scale: factor of the token embeddings.
        attention_scale: factor of the attention scores.
        windows: per layer, positions visible to a query, itself included; None sees all.
        ropes: per layer; None rotates nothing.
        attention_softcap: scores become ``cap * tanh(scores / cap)``.
        logit_softcap: the same for the logits.
        quantization: how the checkpoint's weights are stored; None: as plain numbers.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    quantization: CheckpointQuantization | None = None

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        """Read ``path / "config.json"``, as written by transformers 4 or 5.

        Raises:
            ModelLoadError: the file is missing or no JSON object, the architecture is unsupported, a required entry is
                missing, or an option would change the mathematics in a way the decoder does not know.
        """
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{file}: cannot be read as a model configuration: {error}") from error
        if not isinstance(raw, dict):
            raise ModelLoadError(f"{file}: holds no JSON object")
        try:
            return _Reader(raw).build()
        except _Unsupported as error:
            raise ModelLoadError(f"{file}: {error}") from None
        except (AttributeError, TypeError, ValueError, KeyError, ZeroDivisionError) as error:
            raise ModelLoadError(f"{file}: an entry has an unusable value: {error!r}") from error


class _Unsupported(Exception):
    """The reason, without the file."""


class _Reader:
    """One config.json with the architecture's defaults beneath it."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.architecture = _architecture(raw)
        defaults = {**_COMMON, **_DEFAULTS[self.architecture]}
        self.values = {**defaults, **{key: value for key, value in raw.items() if value is not None}}
        self.raw = raw
        self.gemma = self.architecture.startswith("Gemma")
        for key in _REFUSED:
            if self.values.get(key):
                raise _Unsupported(f"option {key}={self.values[key]!r} is not supported")

    def build(self) -> ModelConfig:
        get = self.values.get
        heads, hidden = self.size("num_attention_heads"), self.size("hidden_size")
        kv_heads = self.size("num_key_value_heads") if "num_key_value_heads" in self.values else heads
        head_dim = self.size("head_dim") if "head_dim" in self.values else hidden // heads
        if heads % kv_heads or head_dim % 2:
            raise _Unsupported(f"{heads} heads of {head_dim} with {kv_heads} KV heads are not supported")
        layers = self.size("num_hidden_layers")
        bias = bool(get("attention_bias")) and self.architecture not in ("MistralForCausalLM", "Qwen2ForCausalLM")
        kinds = self.layer_types(layers)
        return ModelConfig(
            architecture=self.architecture,
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=self.size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=self.size("vocab_size"),
            max_position_embeddings=self.size("max_position_embeddings"),
            rms_norm_eps=float(self.values["rms_norm_eps"]),
            activation=self.activation(),
            tie_word_embeddings=bool(get("tie_word_embeddings")),
            attention_scale=float(self.values["query_pre_attn_scalar"] if self.gemma else head_dim) ** -0.5,
            windows=tuple(self.size("sliding_window") if kind == "sliding_attention" else None for kind in kinds),
            ropes=self.ropes(kinds),
            qkv_bias=bias or self.architecture == "Qwen2ForCausalLM",
            o_bias=bias,
            mlp_bias=bool(get("mlp_bias")) and self.architecture in ("LlamaForCausalLM", "SmolLM3ForCausalLM"),
            qk_norm=self.architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
            norm_offset=1.0 if self.gemma else 0.0,
            post_norms=self.gemma,
            embedding_scale=math.sqrt(hidden) if self.gemma else 1.0,
            # Only Gemma 2 caps its scores; the other architectures ignore the entry.
            attention_softcap=self.softcap("attn_logit_softcapping", "Gemma2ForCausalLM"),
            logit_softcap=self.softcap("final_logit_softcapping", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
            quantization=self.quantization(),
        )

    def quantization(self) -> CheckpointQuantization | None:
        try:
            return CheckpointQuantization.parse(self.values.get("quantization_config"))
        except ValueError as error:
            raise _Unsupported(str(error)) from None

    def size(self, key: str) -> int:
        value = self.values.get(key)
        if value is None:
            raise _Unsupported(f"entry {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _Unsupported(f"{key}={value!r} is not a positive integer")
        return value

    def softcap(self, key: str, *architectures: str) -> float | None:
        # An explicit null switches the cap off, so the defaults must not fill it in.
        value = self.raw[key] if key in self.raw else self.values.get(key)
        return float(value) if value and self.architecture in architectures else None

    def activation(self) -> Activation:
        name = self.values.get("hidden_activation") if self.gemma else self.values["hidden_act"]
        if name not in _ACTIVATIONS:
            raise _Unsupported(f"activation {name!r} is not supported")
        return _ACTIVATIONS[name]

    def layer_types(self, layers: int) -> list[str]:
        """Per layer "full_attention" or "sliding_attention"."""
        kinds = self.values.get("layer_types") or [
            "sliding_attention" if self.slides_by_default(layer) else "full_attention" for layer in range(layers)
        ]
        if self.architecture == "MistralForCausalLM":
            explicit_null = "sliding_window" in self.raw and self.raw["sliding_window"] is None
            kinds = ["full_attention" if explicit_null else "sliding_attention"] * layers
        elif self.architecture == "LlamaForCausalLM" or (not self.gemma and not self.values.get("use_sliding_window")):
            # Llama has no windows; in the others the switch overrules the list.
            if self.architecture == "LlamaForCausalLM" and "sliding_attention" in kinds:
                raise _Unsupported("layer_types with sliding_attention are not supported in LlamaForCausalLM")
            kinds = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise _Unsupported(f"layer_types with {', '.join(map(repr, sorted(unknown)))} are not supported")
        if len(kinds) != layers:
            raise _Unsupported(f"layer_types has {len(kinds)} entries for {layers} layers")
        return kinds

    def slides_by_default(self, layer: int) -> bool:
        if self.architecture == "Gemma2ForCausalLM":
            return layer % 2 == 0
        if self.architecture == "Gemma3ForCausalLM":
            return (layer + 1) % self.size("sliding_window_pattern") != 0
        if not self.values.get("use_sliding_window") or not self.values.get("sliding_window"):
            return False
        if self.architecture == "SmolLM3ForCausalLM":
            return not self.rotates(layer)
        return layer >= int(self.values.get("max_window_layers", 28))

    def rotates(self, layer: int) -> bool:
        if self.architecture != "SmolLM3ForCausalLM":
            return True
        flags = self.values.get("no_rope_layers")  # 1 means: with rotary embedding
        return bool(flags[layer]) if flags else (layer + 1) % self.size("no_rope_layer_interval") != 0

    def ropes(self, kinds: list[str]) -> tuple[RopeConfig | None, ...]:
        parameters = self.values.get("rope_parameters")
        if self.architecture == "Gemma3ForCausalLM":
            if parameters and "full_attention" in parameters:
                by_kind = {kind: self.rope(parameters[kind]) for kind in set(kinds)}
            else:
                local = RopeConfig(float(self.values["rope_local_base_freq"]))
                by_kind = {"full_attention": self.rope(self.old_rope()), "sliding_attention": local}
            return tuple(by_kind[kind] for kind in kinds)
        rope = self.rope(parameters or self.old_rope())
        return tuple(rope if self.rotates(layer) else None for layer in range(len(kinds)))

    def old_rope(self) -> dict[str, Any]:
        """The form of transformers 4: ``rope_theta`` beside an optional ``rope_scaling``."""
        return {"rope_theta": self.values["rope_theta"], **(self.values.get("rope_scaling") or {})}

    def rope(self, parameters: Mapping[str, Any]) -> RopeConfig:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        theta = float(parameters.get("rope_theta", self.values["rope_theta"]))
        for place in (parameters, self.values):
            if place.get("partial_rotary_factor", 1.0) != 1.0:
                raise _Unsupported(f"partial_rotary_factor={place['partial_rotary_factor']!r} is not supported")
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, factor=float(parameters["factor"]))
        if kind == "llama3":
            original = parameters.get("original_max_position_embeddings") or self.size("max_position_embeddings")
            low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
            return RopeConfig(theta, kind, float(parameters["factor"]), low, high, int(original))
        raise _Unsupported(f"rope type {kind!r} is not supported")


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    name = names[0] if names else f"model_type {raw.get('model_type')!r}"
    if name not in _DEFAULTS:
        raise _Unsupported(f"architecture {name} is not supported; supported are {', '.join(sorted(_DEFAULTS))}")
    return name
