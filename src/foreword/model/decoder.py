"""The decoder: one implementation for every supported architecture, written for paged KV and flat batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from foreword.model.config import ModelConfig
from foreword.model.rotary import RotaryTables, Rotation
from foreword.ops.protocol import AttentionSpec, KVLayer, LinearOp

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.model.inputs import ForwardBatch
    from foreword.ops.protocol import Ops


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of one layer, packed. Norm weights hold the offset already; None: the model has no such norm."""

    qkv: LinearOp  # [N, hidden] -> [N, (num_heads + 2 * num_kv_heads) * head_dim]
    output: LinearOp  # [N, num_heads * head_dim] -> [N, hidden]
    gate_up: LinearOp  # [N, hidden] -> [N, 2 * intermediate]
    down: LinearOp  # [N, intermediate] -> [N, hidden]
    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    attention_post_norm: Tensor | None = None  # [hidden]
    mlp_post_norm: Tensor | None = None  # [hidden]
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None  # [head_dim]


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
        layers: Sequence[DecoderLayer],
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
        device = str(embedding.device)
        self._rotary = RotaryTables(config.ropes, config.head_dim, config.max_position_embeddings, device)
        scale, softcap = config.attention_scale, config.attention_softcap
        self._specs = [AttentionSpec(scale, window, softcap) for window in config.windows]

    def forward(self, batch: ForwardBatch, layers: Sequence[KVLayer]) -> Tensor:
        """Run the batch, writing its keys and values into ``layers``.

        Returns:
            ``[N, hidden]``, after the final norm; padding rows hold finite values without meaning.
        """
        rotations = self._rotary.at(batch.positions)
        hidden = F.embedding(batch.token_ids, self._embedding)  # [N, hidden]
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for number, layer in enumerate(self.layers):
            rope = self.config.ropes[number]
            attended = self._attention(
                layer, hidden, batch, layers[number], rotations[rope] if rope else None, self._specs[number]
            )
            hidden = hidden + attended
            hidden = hidden + self._mlp(layer, hidden)
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden] -> [R, vocab]`` float32."""
        rows = hidden.shape[0]
        padded = F.pad(hidden, (0, 0, 0, self.ops.pad_rows(rows) - rows))
        logits = self._head(padded)[:rows].float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attention(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        batch: ForwardBatch,
        kv: KVLayer,
        rotation: Rotation | None,
        spec: AttentionSpec,
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
        attended = self.ops.attention(query, kv, batch.attention, spec)  # [N, H, D]
        result = layer.output(attended.view(hidden.shape[0], -1))
        return result if layer.attention_post_norm is None else self._norm(result, layer.attention_post_norm)

    def _mlp(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))  # [N, 2 * intermediate]
        result = layer.down(self.ops.gated_activation(gate_up, self.config.activation))
        return result if layer.mlp_post_norm is None else self._norm(result, layer.mlp_post_norm)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return self.ops.rms_norm(x, weight, self.config.rms_norm_eps)
