"""Whether the kernels compute on a device what they should: each once on small inputs, against double precision.

What ``device="auto"`` asks before it takes a GPU. Two prompts go on from a beginning in the pool, and then decode for
three steps, of which the second is captured as a graph and the third replays it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton

from foreword import __version__
from foreword.ops.protocol import (
    AttentionSequence,
    AttentionSpec,
    Draw,
    KVLayer,
    QuantizedWeight,
    Rotation,
    SlotCopy,
    SlotRun,
)
from foreword.ops.quantize import dequantize, quantize
from foreword.ops.triton.backend import TritonOps
from foreword.ops.triton.graphs import DecodeGraphs
from foreword.ops.triton.kv_write import rotate_and_store
from foreword.ops.triton.numeric import INTERPRETED
from foreword.ops.triton.packing import pack_plain
from foreword.ops.triton.step import StepPlans

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

logger = logging.getLogger("foreword")

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest value."""
_HEADS, _KV_HEADS, _DIM, _BLOCK = 4, 2, 64, 16
_SHARED = 256
"""Positions that both prompts begin with, from slot 0 on."""
_OWN = _SHARED, _SHARED + 4 * _BLOCK
"""The first slot of each prompt's own blocks."""
_PROMPTS = 10, 13
"""Their positions behind the shared ones."""
_SPEC = AttentionSpec(_DIM**-0.5)


def find_fault(device: str, dtype: torch.dtype, directory: Path) -> str | None:
    """What :func:`check_kernels` finds wrong; None: nothing. That is remembered in ``directory`` for this GPU and these
    versions, as the first check of a machine waits for the kernels to be compiled."""
    if INTERPRETED and torch.device(device).type == "cuda":
        return "TRITON_INTERPRET is set, so they would run in Triton's interpreter"
    try:
        file = directory / f"gpu-kernels-checked-{_key(device, dtype)}"
        if file.exists():
            return None
        logger.info("checking the kernels on %s, once for this GPU and these versions: they are compiled now", device)
        check_kernels(device, dtype)
    except Exception as error:  # a driver's, a compiler's, whatever: the CPU is there
        return f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        file.touch()
    return None


def _key(device: str, dtype: torch.dtype) -> str:
    gpu = f"{torch.cuda.get_device_properties(device)}" if torch.device(device).type == "cuda" else "interpreter"
    versions = f"foreword {__version__}, triton {triton.__version__}, torch {torch.__version__}"
    return hashlib.sha256(f"{gpu} {dtype} {versions}".encode()).hexdigest()[:16]


def check_kernels(device: str, dtype: torch.dtype) -> None:
    """Run every kernel that a usual model needs.

    Raises:
        RuntimeError: one gave wrong results; says which and how far off. Whatever else a driver or a compiler raises.
    """
    ops = TritonOps(dtype, device, block_size=_BLOCK)
    ops.enter_thread()
    with torch.inference_mode():
        _Attention(ops, torch.device(device)).check()
        _check_products(ops, device)
        _check_rows(ops, device)
        _check_draws(ops, device)
        _check_copies(ops, device)


class _Attention:
    """Two sequences in a pool on the device, and what is in it in double precision on the host."""

    def __init__(self, ops: TritonOps, device: torch.device) -> None:
        self.ops = ops
        self.device = device
        self.random = torch.Generator().manual_seed(0)
        angles = torch.arange(400)[:, None] * 0.5 ** torch.arange(_DIM // 2)
        self.rotation = Rotation(angles.cos(), angles.sin())
        self.on_device = Rotation(*(table.to(device) for table in self.rotation))
        pool = torch.randn((2, _KV_HEADS, 400, _DIM), generator=self.random).to(ops.dtype)
        self.kv = pool.double().transpose(1, 2).contiguous()  # [2, slots, K, D]
        self.layer = KVLayer(*pool.to(device))
        settings = ops.plan_settings(ops.dtype, _HEADS, _KV_HEADS, _DIM)
        self.graphs = DecodeGraphs(self.run, settings, [None], ops.count)

    def check(self) -> None:
        first, second = _PROMPTS
        prompts = [self.part(0, first, 0, first), self.part(1, second, first, second)]
        qkv, slots = self.rows(prompts)
        plans = StepPlans.create(prompts, self.device)
        self.compare("attention of prompts", self.run(qkv, plans, slots, slots), prompts)
        for step, way in enumerate(("decoding", "a captured graph", "a replayed graph"), 1):
            parts = [self.part(number, 1, number, _PROMPTS[number] + step) for number in (0, 1)]
            qkv, slots = self.rows(parts)
            result = self.graphs(qkv, StepPlans.create(parts, self.device), slots, torch.arange(2))
            self.compare(way, result, parts)

    def part(self, number: int, query_len: int, query_start: int, own: int) -> AttentionSequence:
        """Of one of the two, which has ``own`` positions behind the shared ones."""
        runs = SlotRun(0, _SHARED), SlotRun(_OWN[number], own)
        return AttentionSequence(query_start, query_len, _SHARED + own, runs)

    def rows(self, parts: Sequence[AttentionSequence]) -> tuple[Tensor, Tensor]:
        """``[T, (H + 2 K) * D]`` new rows, and the slots of their KV; notes what should come of them."""
        places = [(_slots(part), part.kv_len - part.query_len) for part in parts]
        count = sum(part.query_len for part in parts)
        qkv = torch.randn((count, _HEADS + 2 * _KV_HEADS, _DIM), generator=self.random).to(self.ops.dtype)
        positions = torch.cat(
            [torch.arange(part.query_len) + start for part, (_, start) in zip(parts, places, strict=True)]
        )
        slots = torch.cat([held[start:] for held, start in places])
        query, key, value = qkv.double().split((_HEADS, _KV_HEADS, _KV_HEADS), dim=1)
        self.query, key = (_rotated(x, self.rotation, positions).to(self.ops.dtype).double() for x in (query, key))
        self.kv[0, slots], self.kv[1, slots] = key, value
        return qkv.flatten(1).to(self.device), slots.int().to(self.device)

    def run(self, qkv: Tensor, plans: StepPlans, slots: Tensor, _: Tensor) -> Tensor:
        """A layer's rotation, writing and attention."""
        heads = qkv.view(-1, _HEADS + 2 * _KV_HEADS, _DIM)
        query, key, value = heads.split((_HEADS, _KV_HEADS, _KV_HEADS), dim=1)
        rotate_and_store(query, key, value, self.layer, slots, self.on_device, plans.positions)
        return self.ops.attention(query, self.layer, plans, _SPEC)

    def compare(self, what: str, result: Tensor, parts: Sequence[AttentionSequence]) -> None:
        expected = []
        for part in parts:
            query = self.query[part.query_start : part.query_start + part.query_len].transpose(0, 1)  # [H, Q, D]
            key, value = (
                kv[_slots(part)].transpose(0, 1).repeat_interleave(_HEADS // _KV_HEADS, 0) for kv in self.kv
            )  # [H, P, D]
            seen = torch.ones(part.query_len, part.kv_len, dtype=torch.bool).tril(part.kv_len - part.query_len)
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=_SPEC.scale)
            expected.append(attended.transpose(0, 1))
        _compare(what, result, torch.cat(expected))


def _slots(part: AttentionSequence) -> Tensor:
    """Of its positions."""
    return torch.cat([torch.arange(run.start, run.start + run.length) for run in part.runs])


def _rotated(x: Tensor, rotation: Rotation, positions: Tensor) -> Tensor:
    """``x [N, heads, D]`` float64."""
    cos, sin = (table[positions].double()[:, None] for table in rotation)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _check_products(ops: TritonOps, device: str) -> None:
    """With weights of every kind, for one row and for some."""
    weight, x = _randn(96, 192).to(ops.dtype), _randn(5, 192).to(ops.dtype)
    kinds: dict[str, Tensor | QuantizedWeight] = {
        "plain": weight,
        "int8": quantize(weight, "int8"),
        "int4": quantize(weight, "int4"),
    }
    for name, held in kinds.items():
        plain = dequantize(held) if isinstance(held, QuantizedWeight) else held
        products = [ops.linear(held if isinstance(held, QuantizedWeight) else held.to(device))]
        if name == "plain":
            products.append(ops.packed_linear(pack_plain(weight.to(device))))
        for product in products:
            for rows in (x, x[:1]):
                _compare(f"{name} products", product(rows.to(device)), rows.double() @ plain.double().t())


def _check_rows(ops: TritonOps, device: str) -> None:
    """Norms and activations."""
    x, weight = _randn(5, 192).to(ops.dtype), _randn(192).to(ops.dtype)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    _compare("norms", ops.rms_norm(x.to(device), weight.to(device), 1e-5), normed)
    gate, up = wide.chunk(2, dim=-1)
    _compare("activations", ops.gated_activation(x.to(device), "silu"), F.silu(gate) * up)


def _check_draws(ops: TritonOps, device: str) -> None:
    """The most likely token, one of all, one of the 50 most likely, and one of those that have half of the weight."""
    logits = _randn(4, 5000)
    weights = logits.double().softmax(-1)
    weights[2, weights[2] < weights[2].topk(50).values[-1]] = 0
    likely, tokens = weights[3].sort(descending=True)
    weights[3, tokens[likely.cumsum(0) - likely >= 0.5]] = 0
    points = [0.0, 0.6, 0.4, 0.7]
    along = weights.cumsum(-1)
    expected = [int(torch.searchsorted(row, u * row[-1], right=True)) for row, u in zip(along, points, strict=True)]
    expected[0] = int(logits[0].argmax())
    hows = Draw(), Draw(1.0), Draw(1.0, top_k=50), Draw(1.0, top_p=0.5)
    draws = [how._replace(u=u) for how, u in zip(hows, points, strict=True)]
    if (found := ops.draw(logits.to(device), draws).tolist()) != expected:
        raise RuntimeError(f"tokens {found} were drawn instead of {expected}")


def _check_copies(ops: TritonOps, device: str) -> None:
    """Within a pool, and to pinned main memory and back, beside what else is done."""
    pool = _randn(1, 2, _KV_HEADS, 4 * _BLOCK, _DIM).to(ops.dtype).to(device)
    main = torch.zeros(pool.shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
    expected = pool[..., 5 : 5 + _BLOCK, :].clone()
    ops.copy_slots(pool, [SlotCopy(5, 32, _BLOCK)])
    with ops.aside():
        ops.copy_blocks(pool, main, [SlotCopy(32, 16, _BLOCK)])
        ops.copy_blocks(main, pool, [SlotCopy(16, 0, _BLOCK)])
    for start in (32, 0):
        if not torch.equal(pool[..., start : start + _BLOCK, :], expected):
            raise RuntimeError("copied keys and values are others" + (" after they were in main memory" * (not start)))


def _randn(*shape: int) -> Tensor:
    """The same on every machine; the program's own random numbers stay as they are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def _compare(what: str, result: Tensor, expected: Tensor) -> None:
    """``expected`` in double precision on the host."""
    error = float((result.cpu().double() - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE[result.dtype]:
        raise RuntimeError(f"{what}: off by {error:.2g} of the largest value")
