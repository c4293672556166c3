"""The CPU backend on the package's own C kernels: quantised and plain weights, fp32 activations, a pass in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.cpu import CpuOps
from foreword.ops.cpu.native import costs as measured
from foreword.ops.cpu.native import library as lib
from foreword.ops.cpu.native.plan import Costs, NativePlan, make_plan
from foreword.ops.cpu.threads import use_torch_threads
from foreword.ops.grouped import to_blocks
from foreword.ops.kv_int8 import scale_width
from foreword.ops.protocol import (
    AttentionSequence,
    AttentionSpec,
    DecoderShape,
    FusedLayers,
    GroupedWeight,
    KVLayer,
    LayerWeights,
    LinearOp,
    QuantizedWeight,
    SlotCopy,
    SlotRun,
    Weight,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {torch.float32: lib.F32, torch.bfloat16: lib.BF16, torch.int8: lib.Q8, "int8": lib.Q8, "int4": lib.Q4}
_LINE, _ARENA_BYTES = 64, 64 * 2**20
DEFAULT_COSTS = Costs(tile=1.0, row=0.6)


class NativeOps(CpuOps):
    """:class:`foreword.ops.protocol.Ops` on the C kernels; what they do not speed up is inherited.

    Args:
        dtype: of weights that are not quantised and of KV that is not int8: float32 or bfloat16. Activations are
            float32.
        kernels: the instruction set, one of :func:`foreword.ops.cpu.native.library.available`.
        num_threads: threads of the kernels' own pool; None takes torch's number.
        onednn: products of unquantised weights go through oneDNN, layer by layer, and only attention is native: faster
            where the processor multiplies bfloat16 itself (AVX512-BF16, AMX), which these kernels do not do.
        costs: what the shared-prefix plan weighs; :meth:`calibrate` measures them.
        share_prefixes: off, no tile is shared; for tests and measurements: the results have the same bits.

    Raises:
        ValueError: the kernels are not available.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        kernels: str,
        num_threads: int | None = None,
        costs: Costs = DEFAULT_COSTS,
        share_prefixes: bool = True,
        onednn: bool = False,
    ) -> None:
        super().__init__(dtype, num_threads)
        self._onednn = onednn
        self._arena = _Arena()
        self.name = kernels
        self.share_prefixes = share_prefixes
        self._costs = costs
        self._num_kv_heads = 1  # that plans are made for; fuse() tells the model's
        self._fused = False
        self._kernels = lib.Kernels(kernels, self.num_threads)

    @property
    def kv_layout(self) -> str:
        return f"native groups of {lib.SLOTS} slots, {self.name} kernels{', oneDNN' if self._onednn else ''}"

    def enter_thread(self) -> None:
        """What is left for torch around fused layers is small, and OpenMP's threads spin for milliseconds after each
        operation, on the processors that the kernels' own threads need: a head behind one started 2 to 3 ms late."""
        use_torch_threads(1 if self._fused else self.num_threads)

    def pad_rows(self, num_rows: int) -> int:
        return super().pad_rows(num_rows) if self._onednn else num_rows

    def linear(self, weight: Weight, bias: Tensor | None = None) -> LinearOp:
        if self._onednn:
            return super().linear(weight, bias)
        if isinstance(weight, GroupedWeight):
            weight = to_blocks(weight)
        return NativeLinear(self._kernels, self._arena, weight, bias)

    def plan_attention(self, sequences: Sequence[AttentionSequence]) -> NativePlan:
        positions = np.concatenate(
            [np.arange(s.kv_len - s.query_len, s.kv_len, dtype=np.int32) for s in sequences] or [np.empty(0, np.int32)]
        )
        plan = make_plan(
            sequences,
            positions,
            num_kv_heads=self._num_kv_heads,
            num_threads=self.num_threads,
            costs=self._costs,
            share=self.share_prefixes,
        )
        self.tiles_read += plan.tiles_read
        self.tiles_used += plan.tiles_used
        return plan

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slots: Tensor) -> None:
        key, value = key.float().contiguous(), value.float().contiguous()
        slots = slots.to(torch.int32)
        model, kv = self._shape(1, layer), _kv_struct(layer)
        self._kernels.library.fw_store_kv(
            model, kv, slots.data_ptr(), len(slots), key.data_ptr(), value.data_ptr(), key.shape[1] * key.shape[2],
        )  # fmt: skip

    def attention(self, query: Tensor, layer: KVLayer, plan: Any, spec: AttentionSpec) -> Tensor:
        dtype, query = query.dtype, query.float().contiguous()
        output = torch.zeros_like(query)
        model = self._shape(query.shape[1], layer, spec.scale)
        options = lib.Layer(softcap=spec.softcap or 0.0, window=spec.window or 0)
        done = self._kernels.library.fw_attend(
            self._kernels.context, model, options, plan.struct, _kv_struct(layer), query.data_ptr(),
            query.shape[1] * query.shape[2], output.data_ptr(),
        )  # fmt: skip
        _check(done)
        return output.to(dtype)

    def copy_slots(self, pool: Tensor, copies: Sequence[SlotCopy]) -> None:
        layers = (lib.KV * len(pool))(*(_kv_struct(KVLayer(layer[0], layer[1])) for layer in pool))
        model = self._shape(1, KVLayer(pool[0, 0], pool[0, 1]))
        for source, target, length in copies:
            self._kernels.library.fw_copy_slots(model, layers, len(pool), source, target, length)

    def fuse(self, shape: DecoderShape, layers: Sequence[LayerWeights], final_norm: Tensor) -> FusedLayers | None:
        self._num_kv_heads = shape.num_kv_heads
        if self._onednn:
            return None
        self._fused = True
        return NativeLayers(self._kernels, shape, layers, final_norm)

    def calibrate(self, shape: DecoderShape, kv_dtype: torch.dtype, directory: Path) -> None:
        group = shape.num_heads // shape.num_kv_heads
        key = f"{lib.VERSION}-{self.name}-{str(kv_dtype).removeprefix('torch.')}-{shape.head_dim}x{group}"
        seconds = self._seconds(group, shape.head_dim, kv_dtype)
        self._costs = measured.remembered(directory, key, lambda: measured.fit(seconds))

    def _seconds(self, group: int, head_dim: int, kv_dtype: torch.dtype) -> Callable[[int, int], float]:
        """How long one task of some rows and tiles takes, one KV head and thus one thread working."""

        def seconds(rows: int, tiles: int) -> float:
            length = tiles * TILE
            layer = KVLayer(*torch.zeros(2, 1, length, head_dim + scale_width(kv_dtype), dtype=kv_dtype))
            sequences = [AttentionSequence(row, 1, length, (SlotRun(0, length),)) for row in range(rows)]
            positions = np.full(rows, length - 1, dtype=np.int32)
            plan = make_plan(sequences, positions, num_kv_heads=1, num_threads=1, costs=self._costs)
            query = torch.zeros(rows, group, head_dim)
            return measured.timed(lambda: self.attention(query, layer, plan, AttentionSpec(1.0)))

        return seconds

    def argmax(self, logits: Tensor) -> list[int | None]:
        chosen = np.empty(len(logits), dtype=np.int32)
        self._kernels.library.fw_argmax(
            self._kernels.context, logits.data_ptr(), logits.shape[0], logits.shape[1], chosen.ctypes.data
        )
        return [None if token < 0 else token for token in chosen.tolist()]

    @staticmethod
    def _shape(num_heads: int, layer: KVLayer, scale: float = 1.0) -> lib.Model:
        num_kv_heads, _, width = layer.key.shape
        return lib.Model(
            num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads,
            head_dim=width - scale_width(layer.key.dtype), kv_kind=_KINDS[layer.key.dtype], scale=scale,
        )  # fmt: skip


class NativeLinear:
    """A packed weight. Also callable by itself: ``[N, in] -> [N, out]`` float32."""

    def __init__(
        self,
        kernels: lib.Kernels,
        arena: _Arena,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
    ) -> None:
        if isinstance(weight, QuantizedWeight):
            kind, rows, (n, k) = _KINDS[weight.scheme], weight.blocks, weight.shape
        else:
            kind, rows, (n, k) = _KINDS[weight.dtype], weight, weight.shape
        rows = rows.contiguous()
        self.panels = arena.take(kernels.library.fw_packed_bytes(kind, n, k))
        kernels.library.fw_pack(kind, rows.data_ptr(), n, k, self.panels.ctypes.data)
        self.bias = None if bias is None else bias.float().contiguous()
        self.struct = lib.Linear(
            kind=kind, n=n, k=k, panels=self.panels.ctypes.data,
            bias=None if self.bias is None else self.bias.data_ptr(),
        )  # fmt: skip
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.float().contiguous()
        output = torch.empty(len(rows), self.struct.n)
        _check(
            self._kernels.library.fw_apply(
                self._kernels.context, self.struct, rows.data_ptr(), len(rows), output.data_ptr()
            )
        )
        return output


class NativeLayers:
    """All layers and the final norm in one call."""

    def __init__(
        self,
        kernels: lib.Kernels,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
    ) -> None:
        self._kernels = kernels
        self._kept: list[Any] = list(layers)  # what the structs point to
        structs = (lib.Layer * len(layers))(*(self._layer(layer) for layer in layers))
        self._model = lib.Model(
            num_layers=len(layers), hidden=shape.hidden_size, inner=shape.intermediate_size,
            num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            gelu=shape.activation == "gelu_tanh", eps=shape.rms_norm_eps,
            scale=shape.attention_scale, layers=structs, final_norm=self._pointer(final_norm),
        )  # fmt: skip
        self._pool: tuple[Sequence[KVLayer], Any] | None = None

    def __call__(
        self,
        hidden: Tensor,
        plan: NativePlan,
        slots: Tensor,
        layers: Sequence[KVLayer],
        outputs: Tensor,
    ) -> Tensor:
        hidden = hidden.float().contiguous()
        batch = lib.Batch(
            attention=ctypes.pointer(plan.struct), slots=slots.data_ptr(), kv=self._kv(layers),
            hidden=hidden.data_ptr(), outputs=outputs.data_ptr(), num_outputs=len(outputs),
        )  # fmt: skip
        _check(self._kernels.library.fw_forward(self._kernels.context, self._model, batch))
        return hidden[: len(outputs)]

    def _kv(self, layers: Sequence[KVLayer]) -> Any:
        if self._pool is None or self._pool[0] is not layers:
            self._pool = (layers, (lib.KV * len(layers))(*map(_kv_struct, layers)))
            self._model.kv_kind = _KINDS[layers[0].key.dtype]
        return self._pool[1]

    def _layer(self, layer: LayerWeights) -> lib.Layer:
        projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
        norms = (
            layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm,
            layer.query_norm, layer.key_norm,
        )  # fmt: skip
        tables = (None, None) if layer.rotation is None else layer.rotation
        structs = []
        for projection in projections:
            assert isinstance(projection, NativeLinear)
            structs.append(projection.struct)
        return lib.Layer(
            *structs,
            *(self._pointer(tensor) for tensor in (*norms, *tables)),
            layer.attention.softcap or 0.0,
            layer.attention.window or 0,
        )

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _kv_struct(layer: KVLayer) -> lib.KV:
    key = layer.key
    return lib.KV(key.data_ptr(), layer.value.data_ptr(), key.shape[1] * key.shape[2] * key.element_size())


class _Arena:
    """Memory for packed weights, in pieces so large that the system backs them with huge pages."""

    def __init__(self) -> None:
        self._free: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, dtype=np.uint8)

    def take(self, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """``count`` bytes that start on a cache line."""
        start = -self._free.ctypes.data % _LINE
        if start + count > len(self._free):
            self._free = np.empty(max(count, _ARENA_BYTES) + _LINE, dtype=np.uint8)
            start = -self._free.ctypes.data % _LINE
        taken, self._free = self._free[start : start + count], self._free[start + count :]
        return taken


def _check(done: int) -> None:
    if not done:
        raise MemoryError("the native kernels could not get memory for their buffers")
