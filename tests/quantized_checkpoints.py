"""Quantised checkpoints as other programs write them: rounded to nearest, and packed number by number.

Nothing here comes from the engine: the layouts are written down a second time, by the formats' definitions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that AutoAWQ puts in each nibble of a word, from the lowest: ``order_map`` of its ``from_linear``."""
IN_ORDER = tuple(range(8))

_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "awq by column": {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False},
    "gptq v2": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq desc_act": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq",
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 blocks": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 32],
    },
    "fp8 channels": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**_FP8_WEIGHTS, "strategy": "channel"}}},
    },
}  # fmt: skip
"""``quantization_config`` by name: each layout that is read."""


class FourBits(NamedTuple):
    """A weight ``[out, in]``: numbers below 16 ``[out, in]``, scales (float16) and zero points ``[groups, out]``, and
    the group of each input."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    @property
    def values(self) -> Tensor:
        """``[out, in]`` float32."""
        return (self.numbers - self.zeros[self.group_of].t()) * self.scales.float()[self.group_of].t()


def round_to_four_bits(weight: Tensor, group: int, *, shuffled: bool, least_zero: int = 0) -> FourBits:
    """``weight [out, in]`` in groups of ``group`` inputs; ``shuffled``: of inputs from anywhere."""
    out, inputs = weight.shape
    order = (
        torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if shuffled else torch.arange(inputs)
    )
    group_of = torch.empty(inputs, dtype=torch.int64)
    group_of[order] = torch.arange(inputs) // group
    parts = weight.float()[:, order].view(out, inputs // group, group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half().t()  # [groups, out]
    zeros = (-low.t() / scales.float()).round().clamp(least_zero, 15).long()
    numbers = (weight.float() / scales.float()[group_of].t() + zeros[group_of].t()).round().clamp(0, 15).long()
    return FourBits(numbers, scales, zeros, group_of)


def words(numbers: Tensor, nibbles: tuple[int, ...]) -> Tensor:
    """Eight neighbours of a row in 32 bits; ``nibbles``: which of them is in each nibble, from the lowest."""
    result = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, which in enumerate(nibbles):
        result |= numbers[:, which::8] << (4 * place)
    return (result - (result >> 31 << 32)).int()


def awq_tensors(weight: FourBits) -> dict[str, Tensor]:
    """As ``WQLinear_GEMM.from_linear`` packs them: outputs interleaved, zero points as they are."""
    packed = {"qweight": words(weight.numbers.t(), AWQ_NIBBLES), "qzeros": words(weight.zeros, AWQ_NIBBLES)}
    return {**packed, "scales": weight.scales.contiguous()}


def gptq_tensors(weight: FourBits, *, version: int = 1) -> dict[str, Tensor]:
    """As ``QuantLinear.pack`` packs them: inputs in order, zero points less one in the first version."""
    return {
        "qweight": words(weight.numbers, IN_ORDER).t().contiguous(),
        "qzeros": words(weight.zeros - (1 if version == 1 else 0), IN_ORDER),
        "scales": weight.scales.contiguous(),
        "g_idx": weight.group_of.int(),
    }


def fp8_tensors(weight: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors, and the values ``[out, in]`` float32 that they stand for."""
    out, inputs = weight.shape
    high, wide = config.get("weight_block_size") or ((out, inputs) if config["quant_method"] == "fp8" else (1, inputs))
    scales = torch.zeros(-(-out // high), inputs // wide)
    numbers, values = torch.empty(out, inputs, dtype=torch.float8_e4m3fn), torch.empty(out, inputs)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[block].abs().max() / 448
            rounded = (weight[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
            numbers.view(torch.uint8)[block] = rounded.view(torch.uint8)
            values[block] = rounded.float() * scales[i, j]
    if config.get("weight_block_size"):
        return {"weight": numbers, "weight_scale_inv": scales}, values
    if config["quant_method"] == "fp8":
        return {"weight": numbers, "weight_scale": scales.view(()), "input_scale": torch.tensor(0.5)}, values
    return {"weight": numbers, "weight_scale": scales}, values


def four_bit_weight(weight: Tensor, config: dict[str, Any]) -> FourBits:
    """``weight`` as a checkpoint of ``config`` has it."""
    group = config["group_size"] if config["group_size"] > 0 else weight.shape[1]
    # The first version of GPTQ cannot store a zero point of 0.
    first = config["quant_method"] == "gptq" and config.get("checkpoint_format") != "gptq_v2"
    return round_to_four_bits(weight, group, shuffled=config.get("desc_act", False), least_zero=int(first))


def q4_1(weight: FourBits) -> Tensor:
    """``[out, bytes]``: blocks of 32 inputs in the bytes of GGUF's Q4_1 with the same numbers and scales, and the
    minimum ``-zero * scale``."""
    groups = weight.group_of[::32]
    scales = weight.scales[groups].t()  # [out, blocks]
    minimums = (-weight.zeros * weight.scales.float())[groups].t().half()
    halves = weight.numbers.view(len(weight.numbers), -1, 2, 16).byte()
    header = torch.stack((scales, minimums), dim=-1).view(torch.uint8)  # [out, blocks, 4]
    return torch.cat((header, halves[:, :, 0] + 16 * halves[:, :, 1]), dim=-1).flatten(1)


def save_quantized(source: Path, target: Path, name: str, *, plain: tuple[str, ...] = ()) -> Path:
    """Write the checkpoint ``source`` as ``target / "stored"``, quantised by ``CONFIGS[name]``; and as ``target /
    "values"`` in float32 what that stands for, with the blocks that are nearest to it in the engine's own 4 bits.

    Args:
        plain: parts of the names of projections that are left as they are.
    """
    config = CONFIGS[name]
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if not module.endswith("_proj") or any(part in module for part in plain):
            stored[key] = values[key] = tensor
            continue
        if "bits" in config:
            weight = four_bit_weight(tensor, config)
            version = 2 if config.get("checkpoint_format") == "gptq_v2" else 1
            parts = awq_tensors(weight) if config["quant_method"] == "awq" else gptq_tensors(weight, version=version)
            values[key] = weight.values
            if not config.get("desc_act"):
                values[key + ".q4_1"] = q4_1(weight)
        else:
            parts, values[key] = fp8_tensors(tensor, config)
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    for folder, tensors, extra in (("stored", stored, {"quantization_config": config}), ("values", values, {})):
        shutil.copytree(source, target / folder)
        save_file(tensors, target / folder / "model.safetensors")
        entries = json.loads((source / "config.json").read_text())
        (target / folder / "config.json").write_text(json.dumps(entries | extra))
    return target
