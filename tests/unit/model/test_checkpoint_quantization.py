"""Quantised checkpoints good and bad: what config.json says of them, and their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.core.errors import ModelLoadError
from foreword.model.checkpoint_quantization import CheckpointQuantization
from foreword.model.config import ModelConfig
from foreword.model.load import load_model
from foreword.ops.cpu import CpuOps
from foreword.ops.protocol import GroupedWeight, LinearOp, Weight
from foreword.ops.quantize import dequantize
from quantized_checkpoints import CONFIGS, save_quantized

PROJECTION = "model.layers.1.self_attn.k_proj"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def compressed(**changes: Any) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors with other weights."""
    groups = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}}}
    return CONFIGS["fp8 channels"] | groups


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (None, None),
        ({}, None),
        (CONFIGS["awq"], CheckpointQuantization("awq", 32)),
        (CONFIGS["awq by column"], CheckpointQuantization("awq", None)),
        ({"quant_method": "awq", "version": "GEMM", "zero_point": False}, CheckpointQuantization("awq", 128)),
        (CONFIGS["gptq"], CheckpointQuantization("gptq", 64, zero_offset=1)),
        (CONFIGS["gptq v2"], CheckpointQuantization("gptq", 32)),
        (CONFIGS["gptq desc_act"], CheckpointQuantization("gptq", 32, zero_offset=1, desc_act=True)),
        ({**CONFIGS["gptq"], "format": "gptq_v2"}, CheckpointQuantization("gptq", 64)),
        (CONFIGS["fp8"], CheckpointQuantization("fp8")),
        (CONFIGS["fp8 blocks"], CheckpointQuantization("fp8", block=(48, 32))),
        (CONFIGS["fp8 channels"], CheckpointQuantization("fp8")),
        (compressed(strategy=None), CheckpointQuantization("fp8")),
        (
            compressed(strategy="block", block_structure=[128, 64]) | {"sparsity_config": {"format": "dense"}},
            CheckpointQuantization("fp8", block=(128, 64)),
        ),
    ],
)
def test_what_is_known(entry: Any, expected: CheckpointQuantization | None) -> None:
    assert CheckpointQuantization.parse(entry) == expected


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ([4], "no JSON object"),
        ({"bits": 4}, "quant_method=None is not supported, only awq or gptq or fp8 or compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        ({**CONFIGS["awq"], "bits": 8}, "bits=8 is not supported, only 4;"),
        ({**CONFIGS["awq"], "version": "gemv"}, "version='gemv'"),
        ({**CONFIGS["awq"], "group_size": 48}, "group_size=48 is not supported, only -1 or a multiple of 32;"),
        ({**CONFIGS["awq"], "group_size": "128"}, "group_size='128'"),
        ({**CONFIGS["awq"], "group_size": 0}, "group_size=0"),
        ({**CONFIGS["gptq"], "bits": 3}, "bits=3"),
        ({**CONFIGS["gptq"], "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**CONFIGS["gptq"], "format": "gptq_p"}, "format='gptq_p'"),
        ({**CONFIGS["gptq"], "dynamic": {"-:.*down.*": {}}}, "dynamic={'-:"),
        ({**CONFIGS["gptq"], "lm_head": True}, "lm_head=True is not supported; take"),
        ({**CONFIGS["gptq"], "pack_dtype": "int16"}, "pack_dtype='int16'"),
        ({**CONFIGS["fp8"], "fmt": "e5m2"}, "fmt='e5m2'"),
        ({**CONFIGS["fp8"], "weight_block_size": 128}, "weight_block_size=128"),
        ({**CONFIGS["fp8 channels"], "format": "pack-quantized"}, "format='pack-quantized'"),
        ({**CONFIGS["fp8 channels"], "config_groups": {}}, "config_groups={}"),
        ({**CONFIGS["fp8 channels"], "transform_config": {"R1": {}}}, "transform_config="),
        ({**CONFIGS["fp8 channels"], "sparsity_config": {"format": "2:4"}}, "sparsity_config="),
        (compressed(num_bits=4), "num_bits=4"),
        (compressed(type="int"), "type='int'"),
        (compressed(symmetric=False), "symmetric=False"),
        (compressed(strategy="group"), "strategy='group' is not supported, only tensor or channel or block;"),
        (compressed(strategy="block"), "block_structure=None"),
        ({**CONFIGS["fp8 channels"], "config_groups": [1]}, "config_groups=[1] is not supported, only weights in"),
        ({**CONFIGS["fp8 channels"], "config_groups": {"group_0": "W8"}}, "config_groups={'group_0': 'W8'}"),
        ({**CONFIGS["fp8 channels"], "config_groups": {"group_0": {"weights": None}}}, "config_groups={'group_0': {'w"),
        ({**CONFIGS["fp8 channels"], "sparsity_config": "2:4"}, "sparsity_config='2:4'"),
    ],
)
def test_what_is_unknown_is_refused_by_name(tiny_dir: Path, tmp_path: Path, entry: Any, reason: str) -> None:
    """File, key and value, and what to do instead."""
    values = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": entry}))
    with pytest.raises(ModelLoadError) as error:
        ModelConfig.from_directory(tmp_path)
    assert reason in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "config.json"))
    if "not supported" in reason:
        assert "take the model's unquantised weights" in str(error.value)


@pytest.fixture(scope="module")
def checkpoints(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("awq", "gptq desc_act", "fp8", "fp8 blocks")
    return {name: save_quantized(tiny_dir, tmp_path_factory.mktemp("q"), name) / "stored" for name in names}


class Recorder(CpuOps):
    """Torch operations that keep what linear layers are made of."""

    def __init__(self) -> None:
        super().__init__(torch.float32, 1)
        self.weights: list[Weight] = []

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> LinearOp:
        self.weights.append(weight)
        return super().linear(weight, bias)


def load(
    source: Path, target: Path, tensors: dict[str, torch.Tensor | None], *, as_stored: bool = False
) -> list[Weight]:
    """The weights of the checkpoint ``source`` with other tensors; None: without them."""
    merged = load_file(source / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, target / "model.safetensors")
    ops = Recorder()
    load_model(target, ModelConfig.from_directory(source), dtype=torch.float32, ops=ops, as_stored=as_stored)
    return ops.weights


K_PROJ = {name: f"{PROJECTION}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx", "weight", "weight_scale",
                                                    "weight_scale_inv", "input_scale")}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "part", "tensor", "reason"),
    [
        ("awq", "qweight", None, "is missing"),
        ("awq", "qzeros", None, "is missing"),
        ("awq", "scales", None, "is missing"),
        ("awq", "qweight", torch.zeros(64, 8).int(), r"has shape \[64, 8\], not \[64, 4\]"),
        ("awq", "qzeros", torch.zeros(1, 4).int(), r"has shape \[1, 4\], not \[2, 4\]"),
        ("awq", "scales", torch.ones(2, 16), r"has shape \[2, 16\], not \[2, 32\]"),
        ("awq", "qweight", torch.zeros(64, 4), "has dtype torch.float32, not torch.int32"),
        ("awq", "scales", torch.ones(2, 32).int(), "has dtype torch.int32"),
        ("awq", "scales", torch.full((2, 32), 1e6), "not finite in float16"),
        ("awq", "weight", torch.ones(32, 64), r"qweight' is unknown|qzeros' is unknown|scales' is unknown"),
        ("gptq desc_act", "g_idx", None, "is missing"),
        ("gptq desc_act", "g_idx", torch.zeros(64).int(), "does not make 2 groups of 32 inputs each"),
        ("gptq desc_act", "qweight", torch.zeros(4, 32).int(), r"has shape \[4, 32\], not \[8, 32\]"),
        ("fp8", "weight", None, "is missing"),
        ("fp8", "weight_scale", None, "has dtype torch.float8_e4m3fn; quantised weights are read"),
        ("fp8", "weight_scale", torch.ones(64), r"has shape \[64\], not \[\] or \[1\] or \[32\] or \[32, 1\]"),
        ("fp8", "weight_scale", torch.tensor(torch.inf), "not finite"),
        ("fp8", "weight", torch.ones(32, 64).to(torch.float8_e5m2), "has dtype torch.float8_e5m2, not"),
        ("fp8 blocks", "weight_scale_inv", torch.ones(2, 2), r"has shape \[2, 2\], not \[1, 2\]"),
        ("fp8 blocks", "weight", torch.ones(32, 64), "has dtype torch.float32, not torch.float8_e4m3fn"),
    ],
)
def test_wrong_tensors_are_named(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, part: str, tensor: torch.Tensor | None, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=rf"{PROJECTION}.*({reason})"):
        load(checkpoints[name], tmp_path, {K_PROJ[part]: tensor})


def test_what_a_backend_cannot_hold_is_named(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the projections of the product."""

    def refuse(*_: Any) -> LinearOp:
        raise ValueError("beyond float16")

    monkeypatch.setattr(Recorder, "linear", refuse)
    directory = checkpoints["awq"]
    with pytest.raises(ModelLoadError, match=r"self_attn\.q_proj, .*k_proj, .*v_proj cannot be used: beyond float16"):
        load_model(directory, ModelConfig.from_directory(directory), dtype=torch.float32, ops=Recorder())


def test_a_truncated_file_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    content = (checkpoints["awq"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    config = ModelConfig.from_directory(checkpoints["awq"])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_model(tmp_path, config, dtype=torch.float32, ops=CpuOps(torch.float32, 1))


def test_tensors_that_change_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Scales of 8-bit activations and KV, which are not used, and a bias of zeros; a bias of anything else is."""
    extra = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_proj.input_scale")}
    load(checkpoints["fp8"], tmp_path, extra)
    load(checkpoints["awq"], tmp_path, {PROJECTION + ".bias": torch.zeros(32)})
    with pytest.raises(ModelLoadError, match=r"k_proj\.bias' is unknown"):
        load(checkpoints["awq"], tmp_path, {PROJECTION + ".bias": torch.ones(32)})
    with pytest.raises(ModelLoadError, match=r"_scale' is unknown"):  # of a checkpoint that is not quantised
        load(checkpoints["fp8"].parent / "values", tmp_path, extra)


def test_parts_in_groups_that_differ(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Projections of one product whose inputs are grouped otherwise: the product is made of their values."""
    name = PROJECTION + ".g_idx"
    g_idx = load_file(checkpoints["gptq desc_act"] / "model.safetensors")[name]
    first, second = (
        load(checkpoints["gptq desc_act"], tmp_path, {name: each}, as_stored=True) for each in (g_idx, g_idx.flip(0))
    )
    assert all(isinstance(weight, GroupedWeight) for weight in first[:8])
    assert [isinstance(weight, GroupedWeight) for weight in second[:8]] == [True] * 4 + [False] + [True] * 3
    before, after = first[4], second[4]
    assert isinstance(before, GroupedWeight)
    assert isinstance(after, torch.Tensor)
    same = (dequantize(before) == after).all(dim=1)
    assert same[:64].all()  # the queries
    assert not same[64:96].any()  # the keys
    assert same[96:].all()


@pytest.mark.parametrize("layout", ["awq", "gptq", "fp8"])
def test_plain_weights_under_a_quantised_configuration(layout: str, tiny_dir: Path, tmp_path: Path) -> None:
    """Refused: one of the two is of another checkpoint."""
    values = save_quantized(tiny_dir, tmp_path, layout) / "values"
    config = json.loads((values / "config.json").read_text())
    (values / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[layout]}))
    with pytest.raises(ModelLoadError, match=f"config.json says quant_method='{layout}', but no weight is quantised"):
        load_model(values, ModelConfig.from_directory(values), dtype=torch.float32, ops=CpuOps(torch.float32))
