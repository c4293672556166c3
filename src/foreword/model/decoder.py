"""The decoder: one implementation for every supported architecture, written for paged KV and flat batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from foreword.model.config import ModelConfig
from foreword.model.rotary import RotaryTables
from foreword.ops.protocol import DecoderShape, KVLayer, LayerWeights, LinearOp, Rotation

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.model.inputs import ForwardBatch
    from foreword.ops.protocol import Ops


class Decoder:
    """A causal language model over paged KV.

    Args:
        embedding: ``[vocab, hidden]``.
        final_norm: ``[hidden]``, with the offset.
        head: the packed output projection, ``[R, hidden] -> [R, vocab]``.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        embedding: Tensor,
        layers: Sequence[LayerWeights],
        rotary: RotaryTables,
        final_norm: Tensor,
        head: LinearOp,
    ) -> None:
        self.config = config
        self.ops = ops
        self.layers = list(layers)
        self._embedding = embedding
        self._final_norm = final_norm
        self._head = head
        # Rounded to the weights' dtype, as the models were trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype).item()
        self._rotary = rotary
        self.shape = DecoderShape(
            config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.rms_norm_eps, config.activation, config.attention_scale,
        )  # fmt: skip
        self._fused = ops.fuse(self.shape, self.layers, final_norm)

    def forward(self, batch: ForwardBatch, layers: Sequence[KVLayer]) -> Tensor:
        """Run the batch, writing its keys and values into ``layers``.

        Returns:
            ``[R, hidden]``, after the final norm: of the rows ``batch.outputs``.
        """
        hidden = F.embedding(batch.token_ids, self._embedding)  # [N, hidden]
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        if self._fused is not None:
            return self._fused(hidden, batch.attention, batch.slot_mapping, layers, batch.outputs)
        rotations = self._rotary.at(batch.positions)
        for number, layer in enumerate(self.layers):
            rope = self.config.ropes[number]
            attended = self._attention(layer, hidden, batch, layers[number], rotations[rope] if rope else None)
            hidden = hidden + attended
            if number == len(self.layers) - 1 and len(batch.outputs) < len(hidden):
                hidden = self._padded(hidden[batch.outputs])
            hidden = hidden + self._mlp(layer, hidden)
        return self._norm(hidden, self._final_norm)[: len(batch.outputs)]

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden] -> [R, vocab]`` float32."""
        logits = self._head(self._padded(hidden))[: len(hidden)].float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _padded(self, rows: Tensor) -> Tensor:
        missing = self.ops.pad_rows(len(rows)) - len(rows)
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows

    def _attention(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        batch: ForwardBatch,
        kv: KVLayer,
        rotation: Rotation | None,
    ) -> Tensor:
        config = self.config
        heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        qkv = qkv.view(-1, sum(heads), config.head_dim)  # [N, H + 2 K, D]
        if layer.query_norm is None:
            query_key, value = qkv.split((heads[0] + heads[1], heads[2]), dim=1)  # [N, H + K, D], [N, K, D]
        else:
            query, key, value = qkv.split(heads, dim=1)  # [N, H, D], [N, K, D], [N, K, D]
            query_key = torch.cat((self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)), dim=1)
        if rotation is not None:
            query_key = self.ops.rotate(query_key, rotation.cos, rotation.sin)
        query, key = query_key.split(heads[:2], dim=1)
        self.ops.store_kv(key, value, kv, batch.slot_mapping)
        attended = self.ops.attention(query, kv, batch.attention, layer.attention)  # [N, H, D]
        result = layer.output(attended.view(hidden.shape[0], -1))
        return result if layer.attention_post_norm is None else self._norm(result, layer.attention_post_norm)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))  # [N, 2 * intermediate]
        result = layer.down(self.ops.gated_activation(gate_up, self.config.activation))
        return result if layer.mlp_post_norm is None else self._norm(result, layer.mlp_post_norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return self.ops.rms_norm(x, weight, self.config.rms_norm_eps)
