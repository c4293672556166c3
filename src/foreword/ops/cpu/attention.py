"""Causal attention over paged KV in plain torch, float32 inside.

Every path (prefill, chunk, decode) does the same arithmetic on the same tiles of 128 absolute positions: the products
and sums within a tile have a fixed width, tiles are added in ascending order, and what a query may not see contributes
exact zeros. So its result has the same bits wherever the borders of chunks, caches and batches fall.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.cpu.schedule import AttentionPlan, Block, Group, HeadGeometry
from foreword.ops.kv_int8 import dequantize_rows
from foreword.ops.protocol import AttentionSpec, KVLayer

if TYPE_CHECKING:
    from torch import Tensor


def attend(query: Tensor, layer: KVLayer, plan: AttentionPlan, spec: AttentionSpec) -> Tensor:
    """See :meth:`foreword.ops.protocol.Ops.attention`."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = layer.key.shape[0]
    heads = HeadGeometry(num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = torch.empty_like(query)
    output[plan.num_tokens :] = 0
    for group in plan.schedule(heads, spec.window):
        _gather(group, layer.key, group.key)
        _gather(group, layer.value, group.value)
        for block in group.blocks:
            _attend_block(query, output, group, block, spec, heads)
    return output


def _gather(group: Group, source: Tensor, target: Tensor) -> None:
    """Copy a group's tokens from ``source [heads, slots, ..]`` to ``target [I, heads, T * TILE, D]``.

    What belongs to no token is zero: a foreign NaN times a probability of zero would be NaN.
    """
    num_heads, num_slots, width = source.shape
    head_dim = target.shape[-1]
    if group.slots is None:
        for item, start, position, length in group.copies:
            target[item, :, position : position + length] = _plain(source[:, start : start + length])
    else:
        offsets = torch.arange(num_heads)[:, None] * num_slots
        index = group.slots[:, None] + offsets  # [I, heads, T * TILE]
        target.view(-1, head_dim).copy_(_plain(source.reshape(-1, width).index_select(0, index.view(-1))))
    if group.dirty:
        target.view(-1, head_dim).index_fill_(0, group.padding, 0)


def _plain(rows: Tensor) -> Tensor:
    return dequantize_rows(rows) if rows.dtype == torch.int8 else rows


def _attend_block(
    query: Tensor, output: Tensor, group: Group, block: Block, spec: AttentionSpec, heads: HeadGeometry
) -> None:
    """One block: scores of all its tiles, the maximum over them, then tile by tile in ascending order."""
    items, kv_heads, rows, head_dim = block.query.shape
    batch, tiles = items * kv_heads, block.tiles[1] - block.tiles[0]
    seen = slice(block.tiles[0] * TILE, block.tiles[1] * TILE)
    key = group.key.view(batch, -1, head_dim)[:, seen]  # [I * K, T * TILE, D]
    value = group.value.view(batch, -1, head_dim)[:, seen].reshape(-1, TILE, head_dim)  # [I * K * T, TILE, D]

    folded = _fold(query, block, spec.scale, heads).view(batch, rows, head_dim)
    scores = torch.bmm(folded, key.transpose(1, 2))  # [I * K, M, T * TILE]
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    by_tile = scores.view(items, kv_heads, rows, tiles, TILE)
    for first, last, mask in block.masks:
        part = by_tile[..., first:last, :]
        part.copy_(torch.where(mask == 0, part, mask))  # added to a NaN, the mask would hide nothing
    scores -= scores.amax(2, keepdim=True)

    weights = scores.new_empty(batch, tiles, rows, TILE)
    torch.exp(scores.view(batch, rows, tiles, TILE).transpose(1, 2), out=weights)
    values = torch.bmm(weights.view(-1, rows, TILE), value)
    if not values.isfinite().all():
        values = _seen_values(weights.view(-1, rows, TILE), value)
    values = values.view(batch, tiles, rows, head_dim)
    result = ascending_sum(values) / ascending_sum(weights.sum(3, keepdim=True))  # [I * K, M, D]
    _unfold(result.view(block.query.shape), output, block, heads)


def _seen_values(weights: Tensor, value: Tensor) -> Tensor:
    """``weights @ value`` in which a weight of zero silences a value that is not finite."""
    finite = value.isfinite()
    sums = torch.bmm(weights, value.where(finite, 0))
    return sums.masked_fill_(torch.bmm(weights, 1.0 - finite.to(weights.dtype)) > 0, torch.nan)


def ascending_sum(parts: Tensor) -> Tensor:
    """Sum of ``parts [B, T, M, D]`` over T from the first to the last, so that zeros before or after change no bit.

    ``parts`` is overwritten; gives ``[B, M, D]``.
    """
    total = parts[:, 0]
    for tile in range(1, parts.shape[1]):
        total += parts[:, tile]
    return total


def _fold(query: Tensor, block: Block, scale: float, heads: HeadGeometry) -> Tensor:
    """The block's queries, scaled, with the query heads of a KV head as rows: ``[I, K, M, D]``."""
    items, count = block.query.shape[0], block.num_queries
    first, end = block.start, block.start + items * count
    chosen = query[first:end] if block.rows is None else query.index_select(0, block.rows)
    chosen = chosen.view(items, count, heads.num_kv_heads, heads.group_size, heads.head_dim)
    used = block.query[:, :, : count * heads.group_size]
    used.unflatten(2, (count, heads.group_size)).copy_(chosen.transpose(1, 2))
    return block.query.mul_(scale)


def _unfold(result: Tensor, output: Tensor, block: Block, heads: HeadGeometry) -> None:
    """Write ``result [I, K, M, D]`` to the block's rows of ``output [N, heads, D]``."""
    items, count = block.query.shape[0], block.num_queries
    used = result[:, :, : count * heads.group_size].unflatten(2, (count, heads.group_size))
    rows = used.transpose(1, 2).reshape(items * count, -1, heads.head_dim)  # [I * Q, num_heads, D]
    if block.rows is None:
        output[block.start : block.start + items * count] = rows
    else:
        output.index_copy_(0, block.rows, rows.to(output.dtype))
