# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Causal attention over paged KV, and the merge of partial results.

One kernel does decoding, chunked prefill and shared prefixes: a program takes an item of the plan
(:mod:`foreword.ops.triton.plan`), stacks the item's rows times the query heads of a KV head in one tile, and walks over
tiles of positions with an online softmax (FlashAttention-2, Dao 2023; with items that have a part of the positions,
FlashDecoding, Dao et al. 2023; with items whose rows are of several sequences, cascade attention, Ye et al. 2025).
Tiles begin at multiples of their width, and a row's results do not change with tiles that it cannot see: exp2 of
minus infinity is 0, the factor of what was summed up before is 1. Where a tile's KV lies changes nothing either.

Not silenced: keys or values that are not finite at later positions of the same sequence, in a tile that a row sees.

No GPU has run these kernels yet; they are tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from foreword.ops.triton.kv_write import KVFormat, kv_format, raw, scales
from foreword.ops.triton.numeric import LOG2_E, decode_e4m3, dot_type, native_fp8, tanh
from foreword.ops.triton.plan import ITEM_FIELDS, MERGE_FIELDS

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.protocol import AttentionSpec, KVLayer
    from foreword.ops.triton.plan import AttentionPlan


@triton.jit
def attention_kernel(
    query, key, value, key_scales, value_scales, output, part_values, part_stats, slopes, items, rows, table,
    query_stride, pool_stride, scale, softcap, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: item ``program_id(0)`` for KV head ``program_id(1)``.

    Shapes: ``query [N, NUM_HEADS, HEAD_DIM]``, ``key, value [num_kv_heads, num_slots, WIDTH]``,
    ``output [N, NUM_HEADS, HEAD_DIM]`` contiguous, ``part_values [parts, NUM_HEADS, HEAD_DIM]`` float32,
    ``part_stats [parts, NUM_HEADS, 2]`` float32: the maximum and the sum of the weights.

    Args:
        scale: of the scores, times log2(e) or, with a soft-cap, divided by it.
        softcap: times log2(e).
        slopes: ``[NUM_HEADS]`` float32, of ALiBi (Press et al. 2022).
        PAGE: slots that an entry of the table stands for.
        SPLIT: positions that are computed by themselves and then folded into the result; 0: the item's.
    """
    item = items + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    count = tl.load(item + 1)
    if count > 0:
        first_row = tl.load(item)
        begin = tl.load(item + 2)
        end = tl.load(item + 3)
        entries = table + tl.load(item + 4)
        part = tl.load(item + 5)

        stacked = tl.arange(0, ROWS)
        index = stacked // GROUP
        alive = index < count
        place = rows + 2 * (first_row + tl.minimum(index, count - 1))  # rows that are none repeat the last
        row = tl.load(place)
        asked = tl.load(place + 1)
        head = kv_head * GROUP + stacked % GROUP
        column = tl.arange(0, BLOCK)
        inside = (column < HEAD_DIM)[None, :]
        source = query + (row.to(tl.int64) * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
        q = tl.load(source, mask=inside, other=0.0).to(DOT)
        slope = asked.to(tl.float32)
        if ALIBI:
            slope = tl.load(slopes + head) * 1.4426950408889634

        keys = key + kv_head.to(tl.int64) * pool_stride
        values = value + kv_head.to(tl.int64) * pool_stride
        key_factors = key_scales + kv_head.to(tl.int64) * (pool_stride // 4)
        value_factors = value_scales + kv_head.to(tl.int64) * (pool_stride // 4)
        if SPLIT:
            acc = tl.full([ROWS, BLOCK], 0.0, tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.full([ROWS], 0.0, tl.float32)
            for number in range(begin // SPLIT, (end + SPLIT - 1) // SPLIT):
                low = tl.maximum(begin, number * SPLIT)
                high = tl.minimum(end, number * SPLIT + SPLIT)
                new_acc, new_top, new_total = _attend(
                    q, asked, slope, keys, values, key_factors, value_factors, entries, low, high, end - 1,
                    scale, softcap, window, HEAD_DIM, BLOCK, WIDTH, FORMAT, NATIVE_FP8, DOT, ROWS, TILE, PAGE,
                    WINDOW, SOFTCAP, ALIBI,
                )  # fmt: skip
                top, kept, added = _weights(top, new_top)
                total = tl.fma(total, kept, new_total * added)
                acc = tl.fma(acc, kept[:, None], new_acc * added[:, None])
        else:
            acc, top, total = _attend(
                q, asked, slope, keys, values, key_factors, value_factors, entries, begin, end, end - 1,
                scale, softcap, window, HEAD_DIM, BLOCK, WIDTH, FORMAT, NATIVE_FP8, DOT, ROWS, TILE, PAGE,
                WINDOW, SOFTCAP, ALIBI,
            )  # fmt: skip

        kept_rows = alive[:, None] & inside
        if part < 0:
            target = output + ((row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM)[:, None] + column[None, :]
            tl.store(target, (acc / total[:, None]).to(output.dtype.element_ty), mask=kept_rows)
        else:
            slot = (part + index).to(tl.int64) * NUM_HEADS + head
            tl.store(part_values + (slot * HEAD_DIM)[:, None] + column[None, :], acc, mask=kept_rows)
            tl.store(part_stats + 2 * slot, top, mask=alive)
            tl.store(part_stats + 2 * slot + 1, total, mask=alive)


@triton.jit
def _attend(
    q, asked, slope, keys, values, key_factors, value_factors, entries, begin, end, last, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    DOT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Queries ``q [ROWS, BLOCK]`` at positions ``asked [ROWS]`` against positions ``[begin, end)``; beyond ``last``
    nothing may be read. Gives the sums ``[ROWS, BLOCK]``, the scores' maximum and the weights' sum ``[ROWS]``."""
    acc = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    seen_end = tl.min(asked, axis=0) + 1  # what all rows see
    seen_begin = begin
    if WINDOW:
        seen_begin = tl.max(asked, axis=0) - window + 1
    within = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        position = start + within
        held = tl.minimum(position, last)  # read twice instead of beyond the end: the mask hides it
        slot = tl.load(entries + held // PAGE) + held % PAGE
        k = _load(keys, slot, HEAD_DIM, BLOCK, WIDTH, FORMAT, NATIVE_FP8, DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if FORMAT == "int8":
            scores *= tl.load(key_factors + slot * (WIDTH // 4) + HEAD_DIM // 4)[None, :]
        if SOFTCAP:
            scores = softcap * tanh(scores)
        if ALIBI:
            scores += slope[:, None] * (position[None, :] - asked[:, None]).to(tl.float32)
        if (start + TILE > seen_end) | (start < seen_begin):
            visible = position[None, :] <= asked[:, None]
            if WINDOW:
                visible &= position[None, :] > asked[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        kept = tl.exp2(top - anchor)
        weights = tl.exp2(scores - anchor[:, None])
        total = tl.fma(total, kept, tl.sum(weights, axis=1))
        v = _load(values, slot, HEAD_DIM, BLOCK, WIDTH, FORMAT, NATIVE_FP8, DOT)
        if FORMAT == "int8":
            weights *= tl.load(value_factors + slot * (WIDTH // 4) + HEAD_DIM // 4)[None, :]
        acc = tl.dot(weights.to(DOT), v, acc * kept[:, None], input_precision="tf32x3")
        top = new_top
    return acc, top, total


@triton.jit
def _load(
    pool, slot, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The rows of ``slot [TILE]`` without their scales, ``[TILE, BLOCK]``."""
    column = tl.arange(0, BLOCK)
    pointers = pool + (slot * WIDTH)[:, None] + column[None, :]
    rows = tl.load(pointers) if BLOCK == HEAD_DIM else tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0)
    if FORMAT == "fp8":
        if NATIVE_FP8:
            return rows.to(tl.float8e4nv, bitcast=True).to(DOT)
        return decode_e4m3(rows).to(DOT)
    return rows.to(DOT)


@triton.jit
def _weights(top, new_top):
    """The maximum of two partial softmaxes, and the factors of either's sums. Both have seen nothing: zero."""
    both = tl.maximum(top, new_top)
    anchor = tl.where(both == float("-inf"), 0.0, both)
    return both, tl.exp2(top - anchor), tl.exp2(new_top - anchor)


@triton.jit
def merge_kernel(
    output, part_values, part_stats, merges, part_list,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program: the parts of merge ``program_id(0)`` for query head ``program_id(1)``, in order, as
    :func:`attention_kernel` folds its splits: with the same operations, and so the same bits."""
    merge = merges + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    first = tl.load(merge + 1)
    count = tl.load(merge + 2)
    if count > 0:
        column = tl.arange(0, BLOCK)
        inside = column < HEAD_DIM
        acc = tl.full([BLOCK], 0.0, tl.float32)
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        for number in range(first, first + count):
            slot = tl.load(part_list + number).to(tl.int64) * NUM_HEADS + head
            new_acc = tl.load(part_values + slot * HEAD_DIM + column, mask=inside, other=0.0)
            new_top = tl.load(part_stats + 2 * slot)
            new_total = tl.load(part_stats + 2 * slot + 1)
            top, kept, added = _weights(top, new_top)
            total = tl.fma(total, kept, new_total * added)
            acc = tl.fma(acc, kept, new_acc * added)
        row = tl.load(merge).to(tl.int64)
        target = output + (row * NUM_HEADS + head) * HEAD_DIM + column
        tl.store(target, (acc / total).to(output.dtype.element_ty), mask=inside)


def tile_heights(dtype: torch.dtype, head_dim: int, *, deterministic: bool) -> tuple[int, ...]:
    """The heights of tiles, in rows, among which plans may choose for queries of ``dtype``; of deterministic plans one.

    The highest are those for which the registers suffice on every device, by the ahead-of-time suite.
    """
    if dtype == torch.float32:
        return (16,)
    if deterministic:
        return (64,) if head_dim <= 128 else (32,)
    return (16, 32, 64, 128) if head_dim <= 128 else (16, 32, 64)


def attention_options(
    dtype: torch.dtype, form: KVFormat, head_dim: int, tile_rows: int, *, split: int, native_fp8: bool
) -> dict[str, Any]:
    """The compile-time parameters of :func:`attention_kernel` that follow from the formats and the plan.

    A tile's width depends on neither the batch nor the plan.

    Args:
        dtype: of queries.
    """
    block = triton.next_power_of_2(head_dim)
    row_bytes = block * dtype.itemsize
    crowded = block * tile_rows >= 128 * 128 or tile_rows >= 128 or row_bytes > 512
    twice = split > 0 and tile_rows > 16 and row_bytes >= 256  # the split's sums and those of all
    return {
        "HEAD_DIM": head_dim,
        "BLOCK": block,
        "WIDTH": form.width,
        "FORMAT": form.name,
        "NATIVE_FP8": native_fp8,
        "DOT": dot_type(dtype),
        "ROWS": tile_rows,
        "TILE": 64 if row_bytes <= 256 and dtype.itemsize == 2 else 32,
        "SPLIT": split,
        "FIELDS": ITEM_FIELDS,
        "num_warps": 8 if crowded or twice else 4,
        "num_stages": 3 if row_bytes <= 512 else 2,
        "enable_fp_fusion": not split,  # or a product and a sum might be rounded once here and twice there
    }


def merge_options(num_heads: int, head_dim: int) -> dict[str, Any]:
    """The compile-time parameters of :func:`merge_kernel`."""
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK": triton.next_power_of_2(head_dim),
        "FIELDS": MERGE_FIELDS,
        "num_warps": 1,
        "num_stages": 3,
    }


def attend(
    query: Tensor, layer: KVLayer, plan: AttentionPlan, spec: AttentionSpec, alibi_slopes: Tensor | None = None
) -> Tensor:
    """Causal attention of a batch over a layer of the pool.

    Args:
        query: ``[N, num_heads, D]``, possibly part of a wider tensor; float32, float16 or bfloat16.
        plan: made for the layer's window, KV heads and group.
        alibi_slopes: ``[num_heads]`` float32; None: no ALiBi.

    Returns:
        ``[N, num_heads, D]``; zeros for the rows after the plan's.

    Raises:
        ValueError: a query that does not fit the layer.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = layer.key.shape[0]
    form = kv_format(layer, head_dim)
    if num_heads % num_kv_heads or query.stride()[1:] != (head_dim, 1):
        raise ValueError(f"a query of shape {tuple(query.shape)} and strides {query.stride()} does not fit "
                         f"{num_kv_heads} KV heads; its heads must be a multiple, side by side")  # fmt: skip
    if form.name == "plain" and layer.key.dtype != query.dtype:
        raise ValueError(f"the query is {query.dtype} and the KV {layer.key.dtype}; give both the same dtype")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    output[plan.num_tokens :] = 0
    num_parts = len(plan.part_list)
    part_values = torch.empty((num_parts, num_heads, head_dim), dtype=torch.float32, device=query.device)
    part_stats = torch.empty((num_parts, num_heads, 2), dtype=torch.float32, device=query.device)
    options = attention_options(
        query.dtype, form, head_dim, plan.tile_rows, split=plan.split, native_fp8=native_fp8(query.device)
    )
    cap = spec.softcap
    if len(plan.items):
        attention_kernel[len(plan.items), num_kv_heads](
            query, raw(layer.key), raw(layer.value), scales(layer.key), scales(layer.value), output, part_values,
            part_stats, part_stats if alibi_slopes is None else alibi_slopes, plan.items, plan.rows, plan.table,
            query.stride(0), layer.key.stride(0), spec.scale * LOG2_E if cap is None else spec.scale / cap,
            0.0 if cap is None else cap * LOG2_E, spec.window or 0,
            NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, PAGE=plan.block_size,
            WINDOW=spec.window is not None, SOFTCAP=cap is not None, ALIBI=alibi_slopes is not None, **options,
        )  # fmt: skip
    if len(plan.merges):
        merge_kernel[len(plan.merges), num_heads](
            output, part_values, part_stats, plan.merges, plan.part_list, **merge_options(num_heads, head_dim)
        )
    return output
