"""Checkpoints that come quantised: what config.json says about their weights, and reading them.

AWQ and GPTQ in 4 bits, and 8-bit floats (e4m3) with a scale for a tensor, for an output, or for a block of both outputs
and inputs. Only weights are quantised here: where a checkpoint also asks for 8-bit activations or KV, it is computed
with those of the engine, which are as exact or more, and their scales are not needed.

Which weights of a checkpoint are quantised, its tensors tell: one that it left as it was is read as in any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foreword.ops.protocol import GroupedWeight

UNUSED_SUFFIXES = (".input_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")
"""Of the scales of activations and KV in 8-bit floats."""

_DEFAULT_GROUP = 128
_WORD = 8
"""Numbers in a word."""


class TensorSource(Protocol):
    """The tensors of a checkpoint."""

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor ``name``, of one of ``shapes`` and of ``dtype``, or, without one, of floating-point numbers of 16
        bits or more."""


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How a checkpoint's quantised weights are stored.

    Attributes:
        group_size: inputs that share a scale in 4 bits; None: all.
        zero_offset: what stored zero points lack.
        desc_act: the inputs of GPTQ's groups are anywhere, so that a list of their groups is needed.
        block: outputs and inputs that share a scale of 8-bit floats; None: a scale is of a tensor or of an output.
    """

    method: Literal["awq", "gptq", "fp8"]
    group_size: int | None = None
    zero_offset: int = 0
    desc_act: bool = False
    block: tuple[int, int] | None = None

    @property
    def bits(self) -> int:
        """Of a weight's number."""
        return 8 if self.method == "fp8" else 4

    @classmethod
    def parse(cls, entry: Any) -> CheckpointQuantization | None:
        """``quantization_config`` of a config.json; None if there is none.

        Raises:
            ValueError: it says something that is not supported; the message names the key and the value.
        """
        if not entry:
            return None
        if not isinstance(entry, Mapping):
            raise ValueError(f"quantization_config={entry!r} is no JSON object")
        method = entry.get("quant_method")
        if method == "awq":
            _expect(entry, "bits", 4)
            _expect(entry, "version", "gemm", "GEMM")
            return cls(method, _group_size(entry))
        if method == "gptq":
            return cls(method, _group_size(entry), _zero_offset(entry), bool(entry.get("desc_act")))
        if method == "fp8":
            _expect(entry, "fmt", "e4m3")
            return cls(method, block=_block(entry, "weight_block_size"))
        if method == "compressed-tensors":
            return cls("fp8", block=_compressed_block(entry))
        _refuse("quant_method", method, "awq", "gptq", "fp8", "compressed-tensors")

    def weight(self, name: str, shape: tuple[int, int], source: TensorSource) -> GroupedWeight | None:
        """The weight ``[out, in]`` of the projection ``name``; None if the checkpoint left it as it was.

        Raises:
            ValueError: its tensors do not make a weight. ``source`` raises its own errors, where one is missing or of
                another shape or dtype.
        """
        if self.method == "fp8":
            return self._fp8(name, shape, source)
        return None if name + ".weight" in source else self._four_bits(name, shape, source)

    def _four_bits(self, name: str, shape: tuple[int, int], source: TensorSource) -> GroupedWeight:
        import torch  # here, as a configuration alone is read without it

        from foreword.ops import grouped

        out, inputs = shape
        group = self.group_size or inputs
        if out % _WORD or inputs % group or group % _WORD:
            raise ValueError(f"{out} outputs and {inputs} inputs are not stored in groups of {group}")
        by_output = self.method == "awq"
        words = (inputs, out // _WORD) if by_output else (inputs // _WORD, out)
        qweight = source.read(name + ".qweight", words, dtype=torch.int32)
        qzeros = source.read(name + ".qzeros", (inputs // group, out // _WORD), dtype=torch.int32)
        scales = source.read(name + ".scales", (inputs // group, out))
        if by_output:
            return grouped.awq(qweight, qzeros, scales)
        listed = self.desc_act or name + ".g_idx" in source
        g_idx = source.read(name + ".g_idx", (inputs,), dtype=torch.int32) if listed else None
        return grouped.gptq(qweight, qzeros, scales, g_idx, zero_offset=self.zero_offset)

    def _fp8(self, name: str, shape: tuple[int, int], source: TensorSource) -> GroupedWeight | None:
        import torch

        from foreword.ops import grouped

        # What is called the inverse is no other number: weights are multiplied by it, too.
        names = [name + suffix for suffix in (".weight_scale", ".weight_scale_inv") if name + suffix in source]
        if not names:
            return None
        out, inputs = shape
        numbers = source.read(name + ".weight", shape, dtype=torch.float8_e4m3fn)
        if self.block is None:
            scale = source.read(names[0], (), (1,), (out,), (out, 1))
            return grouped.fp8(numbers, scale.reshape(1, -1).expand(1, out))
        height, width = self.block
        if inputs % width:
            raise ValueError(f"{inputs} inputs are not stored in blocks of {width}")
        scales = source.read(names[0], (-(-out // height), inputs // width))
        return grouped.fp8(numbers, scales.t().repeat_interleave(height, dim=1)[:, :out])


def _zero_offset(entry: Mapping[str, Any]) -> int:
    """Of GPTQ."""
    _expect(entry, "bits", 4)
    _expect(entry, "pack_dtype", "int32")
    for key in ("dynamic", "lm_head", "is_marlin_format", "rotation"):
        if entry.get(key):
            _refuse(key, entry[key])
    key = "checkpoint_format" if entry.get("checkpoint_format") else "format"
    _expect(entry, key, "gptq", "gptq_v2")
    return 0 if entry.get(key) == "gptq_v2" else 1


def _compressed_block(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block of compressed-tensors' float-quantized weights."""
    _expect(entry, "format", "float-quantized")
    if entry.get("transform_config"):
        _refuse("transform_config", entry["transform_config"])
    sparsity = entry.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        _refuse("sparsity_config", sparsity)
    groups = entry.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    found = [group.get("weights") if isinstance(group, Mapping) else None for group in listed]
    weights = [each for each in found if isinstance(each, Mapping) and each]
    if not weights or len(weights) < len(found):
        _refuse("config_groups", groups, "weights in 8-bit floats")
    blocks = set()
    for each in weights:
        _expect(each, "type", "float")
        _expect(each, "num_bits", 8)
        _expect(each, "symmetric", True)
        _expect(each, "strategy", "tensor", "channel", "block")
        blocks.add(_block(each, "block_structure") if each.get("strategy") == "block" else None)
    if len(blocks) > 1:
        _refuse("config_groups", groups, "the same blocks in all of them")
    return blocks.pop()


def _group_size(entry: Mapping[str, Any]) -> int | None:
    size = entry.get("group_size", _DEFAULT_GROUP)
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and (size < 1 or size % 32)):
        _refuse("group_size", size, -1, "a multiple of 32")
    return None if size == -1 else size


def _block(entry: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    sizes = entry.get(key)
    if sizes is None and key == "weight_block_size":
        return None
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)):
        _refuse(key, sizes, "numbers of outputs and of inputs such as [128, 128]")
    return sizes[0], sizes[1]


def _expect(entry: Mapping[str, Any], key: str, *known: Any) -> None:
    """``entry[key]`` is one of ``known``; one that is absent or null counts as the first."""
    value = entry.get(key)
    if value is not None and value not in known:
        _refuse(key, value, *known)


def _refuse(key: str, value: Any, *known: Any) -> NoReturn:
    only = f", only {' or '.join(map(str, known))}" if known else ""
    raise ValueError(
        f"quantization_config: {key}={value!r} is not supported{only}; take the model's unquantised weights, "
        "which quantization='int8' or 'int4' quantises when they are loaded"
    )
