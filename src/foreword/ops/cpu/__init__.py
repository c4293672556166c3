"""The plain-torch CPU backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from foreword.ops.cpu import attention, elementwise, linear, sampling
from foreword.ops.cpu.schedule import AttentionPlan
from foreword.ops.cpu.threads import use_torch_threads
from foreword.ops.kv_int8 import quantize_rows
from foreword.ops.protocol import (
    Activation,
    AttentionSequence,
    AttentionSpec,
    DecoderShape,
    Draw,
    FusedLayers,
    KVLayer,
    LayerWeights,
    LinearOp,
    SlotCopy,
    Weight,
)  # fmt: skip
from foreword.ops.quantize import dequantize

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class CpuOps:
    """:class:`foreword.ops.protocol.Ops` in torch operations.

    Args:
        dtype: of weights, activations and KV that is not int8: float32 or bfloat16.
        num_threads: threads of the operations; None takes torch's.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, dtype: torch.dtype, num_threads: int | None = None) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the CPU backend computes in float32 or bfloat16, not in {dtype}")
        self.dtype = dtype
        self.name = "torch"
        self.num_threads = num_threads or torch.get_num_threads()
        self.tiles_used = self.tiles_read = 0
        self._smallest_rows = 1
        self._measured: dict[tuple[int, ...], int] = {}

    @property
    def kv_layout(self) -> str:
        return "[layers, 2, heads, slots, dim], torch"

    def enter_thread(self) -> None:
        use_torch_threads(self.num_threads)

    def pad_rows(self, num_rows: int) -> int:
        return linear.pad_rows(num_rows, self._smallest_rows)

    def linear(self, weight: Weight, bias: Tensor | None = None) -> LinearOp:
        if not isinstance(weight, torch.Tensor):  # the quality of the scheme, without its speed
            weight = dequantize(weight).to(self.dtype)
        product = linear.pack_linear(weight, bias)
        shape = tuple(weight.shape)
        if shape not in self._measured:
            self._measured[shape] = linear.smallest_exact_rows(weight)
            self._smallest_rows = max(self._measured.values())
        return product

    def fuse(  # primitive by primitive
        self,
        shape: DecoderShape,  # noqa: ARG002
        layers: Sequence[LayerWeights],  # noqa: ARG002
        final_norm: Tensor,  # noqa: ARG002
    ) -> FusedLayers | None:
        return None

    def calibrate(self, shape: DecoderShape, kv_dtype: torch.dtype, directory: Path) -> None:
        """Its schedule has no choices to weigh."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        return sampling.draw(logits, draws, self.argmax(logits))

    def argmax(self, logits: Tensor) -> list[int | None]:
        """The index of the largest of each row of ``logits [R, V]`` float32, the first of equals; None where a NaN is
        or the largest is infinite."""
        best = [int(row.argmax()) for row in logits]  # of a NaN, if there is one
        return [token if math.isfinite(row[token]) else None for row, token in zip(logits, best, strict=True)]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        return elementwise.gated_activation(gate_up, kind)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return elementwise.rotate(x, cos, sin)

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slots: Tensor) -> None:
        count, slots = slots.shape[0], slots.long()
        if layer.key.dtype == torch.int8:
            key, value = quantize_rows(key[:count]), quantize_rows(value[:count])
        layer.key.index_copy_(1, slots, key[:count].transpose(0, 1))
        layer.value.index_copy_(1, slots, value[:count].transpose(0, 1))

    def plan_attention(self, sequences: Sequence[AttentionSequence]) -> Any:
        return AttentionPlan(sequences)

    def attention(self, query: Tensor, layer: KVLayer, plan: Any, spec: AttentionSpec) -> Tensor:
        return attention.attend(query, layer, plan, spec)

    def copy_slots(self, pool: Tensor, copies: Sequence[SlotCopy]) -> None:
        for source, target, length in copies:
            pool[..., target : target + length, :] = pool[..., source : source + length, :]

    def copy_blocks(self, source: Tensor, target: Tensor, copies: Sequence[SlotCopy]) -> None:
        for begin, end, length in copies:
            target[..., end : end + length, :] = source[..., begin : begin + length, :]

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()  # what was called is done
