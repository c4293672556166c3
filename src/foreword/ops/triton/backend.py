"""The NVIDIA backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton

from foreword.ops.protocol import (
    Activation,
    AttentionSequence,
    AttentionSpec,
    DecoderShape,
    Draw,
    FusedLayers,
    GroupedWeight,
    KVLayer,
    LayerWeights,
    LinearOp,
    QuantizedWeight,
    Rotation,
    SlotCopy,
    Weight,
)  # fmt: skip
from foreword.ops.quantize import dequantize
from foreword.ops.triton import activation, attention, copy, kv_write, norms, sampling
from foreword.ops.triton.attention import tile_heights
from foreword.ops.triton.kv_write import KVFormat
from foreword.ops.triton.layers import TritonLayers
from foreword.ops.triton.matmul import multiply
from foreword.ops.triton.packing import PackedWeight, pack_grouped, pack_plain, pack_quantized
from foreword.ops.triton.plan import PlanDraft, PlanSettings
from foreword.ops.triton.planner import draft_plan
from foreword.ops.triton.step import StepPlans
from foreword.ops.triton.streams import SideStreams

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PROGRAMS_PER_PROCESSOR = 2
"""Of attention, that a multiprocessor runs at the same time."""
_INTERPRETED_PROGRAMS = 2


def rotate_heads(x: Tensor, rotation: Rotation) -> None:
    """Rotate ``x [N, heads, D]``, contiguous, in place by the rows of ``rotation``: by the kernel that also writes keys
    and values, with queries alone."""
    num_tokens, num_heads, head_dim = x.shape
    cos, sin = (part.contiguous() for part in rotation)
    options = kv_write.constants(
        num_heads, 0, head_dim, 2 * cos.shape[-1], KVFormat("plain", head_dim), positions=False
    )  # fmt: skip
    if num_tokens:
        kv_write.kv_write_kernel[triton.cdiv(num_tokens, kv_write.TOKENS), num_heads](
            x, x, x, x, x, x, x, x, x, cos, sin, num_tokens, 0, x.stride(0), 0, 0, 0,
            **options, num_warps=kv_write.NUM_WARPS,
        )  # fmt: skip


class TritonOps:
    """:class:`foreword.ops.protocol.Ops` in Triton's kernels and, for products with plain weights, torch's.

    Args:
        dtype: of weights, activations and KV that is of no 8-bit format.
        device: "cuda" or "cuda:N"; "cpu" under Triton's interpreter.
        block_size: slots of the KV pool that lie side by side for certain.
        deterministic: bits of a row do not depend on the batch, on chunks or on what was cached: products with plain
            weights are Triton's too, and sums are split at fixed places. Without, the libraries choose their kernels by
            the number of rows, and results may differ in the last places.

    Raises:
        ValueError: another dtype.
    """

    def __init__(
        self, dtype: torch.dtype, device: str = "cuda", *, block_size: int = 16, deterministic: bool = False
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"the Triton backend computes in float32, float16 or bfloat16, not in {dtype}")
        self.dtype = dtype
        self.name = "triton"
        self.num_threads = 1
        self.tiles_used = self.tiles_read = 0
        self._device = torch.device(device)
        if self._device == torch.device("cuda"):  # the same one on every thread, whose current ones may differ
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._streams = SideStreams(self._device)
        self._block_size = block_size
        self._deterministic = deterministic
        self._programs = _INTERPRETED_PROGRAMS
        self._device_name = "interpreter"
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            self._programs = properties.multi_processor_count * _PROGRAMS_PER_PROCESSOR
            self._device_name = properties.name

    @property
    def kv_layout(self) -> str:
        kernels = f"triton {triton.__version__}{', deterministic' if self._deterministic else ''}"
        return f"[layers, 2, heads, slots, dim], {kernels}, {self._device_name}"

    def enter_thread(self) -> None:
        """Kernels are launched on the thread's current device."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def pad_rows(self, num_rows: int) -> int:
        return num_rows

    def linear(self, weight: Weight, bias: Tensor | None = None) -> LinearOp:
        if isinstance(weight, GroupedWeight):
            if weight.zeros is None and len(weight.scales) > 1:  # no kernel has 8-bit floats in groups
                return self.linear(dequantize(weight).to(self.dtype), bias)
            packed = pack_grouped(weight)
        elif isinstance(weight, QuantizedWeight):
            blocks = weight.blocks.to(self._device)
            packed = pack_quantized(QuantizedWeight(weight.scheme, blocks, weight.shape))
        elif self._deterministic:
            packed = pack_plain(weight.to(self._device))
        else:
            return lambda x: F.linear(x, weight, bias)
        return self.packed_linear(packed, bias)

    def packed_linear(self, weight: PackedWeight, bias: Tensor | None = None) -> LinearOp:
        """Products with a weight of any of :mod:`foreword.ops.triton.packing`'s layouts, on this device."""
        return lambda x: multiply(x, weight, bias, deterministic=self._deterministic)

    def fuse(self, shape: DecoderShape, layers: Sequence[LayerWeights], final_norm: Tensor) -> FusedLayers:
        return TritonLayers(self, shape, layers, final_norm)

    def calibrate(self, shape: DecoderShape, kv_dtype: torch.dtype, directory: Path) -> None:
        """Nothing to measure: plans are weighed by how many programs the device runs at the same time, which it tells,
        and a shared beginning is read once wherever that saves reading, as the reading is what takes the time."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        return sampling.draw(logits, draws)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        return activation.gated_activation(gate_up, kind)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = x.clone(memory_format=torch.contiguous_format)
        rotate_heads(rotated, Rotation(cos, sin))
        return rotated

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slots: Tensor) -> None:
        kv_write.store(key, value, layer, slots)

    def plan_attention(self, sequences: Sequence[AttentionSequence]) -> StepPlans:
        return StepPlans.create(sequences, self._device)

    def attention(self, query: Tensor, layer: KVLayer, plan: StepPlans, spec: AttentionSpec) -> Tensor:
        found = plan.by_window.get(spec.window)
        if found is None:
            settings = self.plan_settings(query.dtype, query.shape[1], layer.key.shape[0], query.shape[2])
            draft = draft_plan(plan.sequences, settings, spec.window)
            self.count(draft)
            found = plan.by_window[spec.window] = draft.place(self._device)
        return attention.attend(query, layer, found, spec)

    def plan_settings(self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> PlanSettings:
        """For queries of ``dtype``."""
        heights = tile_heights(dtype, head_dim, deterministic=self._deterministic)
        group = num_heads // num_kv_heads
        return PlanSettings(
            num_kv_heads, group, self._block_size, self._programs, heights, self._deterministic
        )  # fmt: skip

    def count(self, draft: PlanDraft) -> None:
        """Count what a plan that is carried out reads."""
        self.tiles_used += draft.tiles_used
        self.tiles_read += draft.tiles_read

    def copy_slots(self, pool: Tensor, copies: Sequence[SlotCopy]) -> None:
        copy.copy_slots(pool, pool, copies)

    def copy_blocks(self, source: Tensor, target: Tensor, copies: Sequence[SlotCopy]) -> None:
        copy.copy_slots(source, target, copies)

    def aside(self) -> AbstractContextManager[None]:
        return self._streams.aside()
