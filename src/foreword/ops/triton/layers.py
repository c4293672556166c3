"""All layers of a decoder with the fused kernels: additions of residuals with the norms behind them, rotation with the
writing of keys and values. A layer of a usual model is six launches of ours and four products. Steps that only decode
go through :mod:`foreword.ops.triton.graphs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreword.ops.protocol import DecoderShape, KVLayer, LayerWeights
from foreword.ops.triton.activation import gated_activation
from foreword.ops.triton.graphs import MOST_ROWS, DecodeGraphs
from foreword.ops.triton.kv_write import rotate_and_store, store
from foreword.ops.triton.norms import add_rms_norm, norm_heads, rms_norm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foreword.ops.triton.backend import TritonOps
    from foreword.ops.triton.step import StepPlans


class TritonLayers:
    """:class:`foreword.ops.protocol.FusedLayers`; see the module."""

    def __init__(self, ops: TritonOps, shape: DecoderShape, layers: Sequence[LayerWeights], final_norm: Tensor) -> None:
        self._ops = ops
        self._shape = shape
        self._layers = list(layers)
        self._next_norms = [*(layer.attention_norm for layer in self._layers[1:]), final_norm]
        self._graphs: tuple[Sequence[KVLayer], DecodeGraphs] | None = None  # of a pool

    def __call__(
        self, hidden: Tensor, plan: StepPlans, slots: Tensor, layers: Sequence[KVLayer], outputs: Tensor
    ) -> Tensor:
        if not plan.decodes or not 0 < len(hidden) <= MOST_ROWS:
            return self._run(hidden, plan, slots, layers, outputs)
        if self._graphs is None or self._graphs[0] is not layers:
            self._graphs = layers, self._decoding(hidden.dtype, layers)
        return self._graphs[1](hidden, plan, slots, outputs)

    def _decoding(self, dtype: torch.dtype, layers: Sequence[KVLayer]) -> DecodeGraphs:
        shape = self._shape
        settings = self._ops.plan_settings(dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        windows = [layer.attention.window for layer in self._layers]

        def run(hidden: Tensor, plan: StepPlans, slots: Tensor, outputs: Tensor) -> Tensor:
            return self._run(hidden, plan, slots, layers, outputs)

        return DecodeGraphs(run, settings, windows, self._ops.count)

    def _run(
        self, hidden: Tensor, plan: StepPlans, slots: Tensor, layers: Sequence[KVLayer], outputs: Tensor
    ) -> Tensor:
        eps, last = self._shape.rms_norm_eps, self._layers[-1]
        normed = rms_norm(hidden, self._layers[0].attention_norm, eps)
        for layer, kv, next_norm in zip(self._layers, layers, self._next_norms, strict=True):
            attended = self._attention(layer, normed, kv, plan, slots)
            if layer is last and len(outputs) < len(hidden):
                attended, hidden = attended.index_select(0, outputs), hidden.index_select(0, outputs)
            hidden, normed = add_rms_norm(attended, hidden, layer.mlp_norm, eps)
            result = layer.down(gated_activation(layer.gate_up(normed), self._shape.activation))
            if layer.mlp_post_norm is not None:
                result = rms_norm(result, layer.mlp_post_norm, eps)
            hidden, normed = add_rms_norm(result, hidden, next_norm, eps)
        return normed

    def _attention(self, layer: LayerWeights, normed: Tensor, kv: KVLayer, plan: StepPlans, slots: Tensor) -> Tensor:
        """``[N, hidden]``, before the residual."""
        shape = self._shape
        heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
        qkv = layer.qkv(normed).view(-1, sum(heads), shape.head_dim)  # [N, H + 2 K, D]
        if layer.query_norm is not None:
            assert layer.key_norm is not None
            norm_heads(qkv[:, : -heads[2]], heads[0], layer.query_norm, layer.key_norm, shape.rms_norm_eps)
        query, key, value = qkv.split(heads, dim=1)  # [N, H, D], [N, K, D], [N, K, D]
        if layer.rotation is None:
            store(key, value, kv, slots)
        else:
            rotate_and_store(query, key, value, kv, slots, layer.rotation, plan.positions)
        attended = self._ops.attention(query, kv, plan, layer.attention)
        result = layer.output(attended.view(len(normed), -1))
        if layer.attention_post_norm is None:
            return result
        return rms_norm(result, layer.attention_post_norm, shape.rms_norm_eps)
