"""Checkpoints good and bad."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.core.errors import ModelLoadError
from foreword.model.config import ModelConfig, RopeConfig
from foreword.model.decoder import Decoder
from foreword.model.digest import fingerprint
from foreword.model.load import load_model
from foreword.model.rotary import RotaryTables, frequencies
from foreword.ops import create_ops

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def tensors() -> dict[str, torch.Tensor]:
    result = {"model.embed_tokens.weight": torch.randn(50, 32), "lm_head.weight": torch.randn(50, 32)}
    result["model.norm.weight"] = torch.ones(32)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (32, 32)),
            ("self_attn.k_proj", (16, 32)),
            ("self_attn.v_proj", (16, 32)),
            ("self_attn.o_proj", (32, 32)),
            ("mlp.gate_proj", (48, 32)),
            ("mlp.up_proj", (48, 32)),
            ("mlp.down_proj", (32, 48)),
            ("input_layernorm", (32,)),
            ("post_attention_layernorm", (32,)),
        ):
            result[prefix + name + ".weight"] = torch.randn(shape)
    return result


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def write_config(directory: Path, **changes: Any) -> None:
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(values))


def config_of(directory: Path, **changes: Any) -> ModelConfig:
    write_config(directory, **changes)
    return ModelConfig.from_directory(directory)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_directory(directory)
    return load_model(directory, config, dtype=dtype, ops=create_ops("cpu", dtype))


def test_a_checkpoint_in_shards_is_the_same_model(directory: Path) -> None:
    hidden = torch.randn(3, 32)
    expected = load(directory).logits(hidden)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, directory / file)
    places = {name: file for file, part in shards.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(load(directory).logits(hidden), expected)

    (directory / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors.*missing"):
        load(directory)
    index.write_text("{")
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load(directory)


def test_every_dtype_is_converted(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in weights.items()}, directory / "model.safetensors")
    assert load(directory, torch.bfloat16).logits(torch.randn(1, 32).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("size", [0, 5, 100, 5000])
def test_a_truncated_file_is_named(directory: Path, size: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(directory)


def test_a_directory_without_weights_is_named(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="neither"):
        load(directory)


def test_wrong_tensors_are_named(directory: Path) -> None:
    file, good = directory / "model.safetensors", tensors()
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({key: tensor for key, tensor in good.items() if key != name}, file)
    with pytest.raises(ModelLoadError, match=rf"{name}.*missing"):
        load(directory)
    save_file({**good, name: torch.randn(32, 32)}, file)
    with pytest.raises(ModelLoadError, match=rf"{name}.*\[32, 32\], not \[16, 32\]"):
        load(directory)
    save_file({**good, name: torch.ones(16, 32, dtype=torch.int8)}, file)
    with pytest.raises(ModelLoadError, match=rf"{name}.*int8"):
        load(directory)
    save_file({**good, "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, file)
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias.*unknown"):
        load(directory)


def test_the_fingerprint_follows_the_checkpoint(directory: Path) -> None:
    first = fingerprint(directory)
    assert first == fingerprint(directory)
    write_config(directory, rope_theta=20000.0)
    second = fingerprint(directory)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert len({first, second, fingerprint(directory)}) == 3
    file.unlink()
    with pytest.raises(ModelLoadError):
        fingerprint(directory)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
    ids=str,
)
def test_what_would_change_the_mathematics_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as error:
        config_of(tmp_path, **changes)
    assert "config.json" in str(error.value)


def test_unreadable_configurations_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)
    for text in ("", "{", "[1]", '"llama"'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            ModelConfig.from_directory(tmp_path)


def test_old_and_new_rope_entries_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = config_of(tmp_path, rope_theta=5e5, rope_scaling=scaling)
    new = config_of(tmp_path, rope_theta="absent", rope_parameters={"rope_theta": 5e5, **scaling})
    assert old == new
    assert old.ropes[0] == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    older = config_of(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert older.ropes == (RopeConfig(1e4, "linear", 4.0),) * 2


def test_gemma_3_in_the_form_of_transformers_4(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=512,
        sliding_window_pattern=3,
        head_dim=16,
        query_pre_attn_scalar=64,
        hidden_activation="gelu_pytorch_tanh",
        hidden_act="absent",
    )
    local, everywhere = RopeConfig(1e4), RopeConfig(1e6, "linear", 8.0)
    assert config.windows == (512, 512, None) * 2
    assert config.ropes == (local, local, everywhere) * 2
    assert config.tie_word_embeddings
    assert config.attention_scale == 1 / 8
    assert config.embedding_scale == pytest.approx(math.sqrt(32))
    assert config.attention_softcap is None


def test_windows_follow_the_switch(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}
    assert config_of(tmp_path, **qwen).windows == (None, None)
    assert config_of(tmp_path, **qwen, use_sliding_window=True).windows == (None, 64)
    assert config_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=9).windows == (9, 9)
    assert config_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).windows == (None, None)
    gemma = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 9, "attn_logit_softcapping": None}
    config = config_of(tmp_path, **gemma)
    assert config.windows == (9, None)
    assert config.attention_softcap is None
    assert config.logit_softcap == 30.0


def test_rotary_tables_do_not_depend_on_the_batch() -> None:
    rope = RopeConfig(1e4)
    torch.testing.assert_close(frequencies(rope, 8), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    tables = RotaryTables((rope, None), 8, 100, "cpu")
    all_rows = tables.at(torch.arange(100))[rope]
    row = tables.at(torch.tensor([77]))[rope]
    assert torch.equal(row.cos[0], all_rows.cos[77])
    assert torch.equal(row.sin[0], all_rows.sin[77])
    assert row.cos[0, 1].item() == pytest.approx(math.cos(7.7), abs=1e-5)
