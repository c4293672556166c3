"""Attention: decoding by itself (G1), behind a shared beginning (G2), and a prompt's chunk (G3)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from foreword.ops.kv_int8 import dequantize_rows, quantize_rows
from foreword.ops.protocol import AttentionSequence, AttentionSpec, KVLayer, SlotRun
from foreword.ops.triton.attention import attend
from foreword.ops.triton.planner import draft_plan, make_plan

from .device import Device, matmul_flops, report_bandwidth
from .sizes import BLOCK, Sizes

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.triton.plan import PlanSettings

    from .results import Report, Spread

FORMS = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_UNMASKED = "all positions"
_TOLERANCE = 0.03
"""Of the largest value of a result, by which its check may differ: a wrong result has no speed."""


class Case(NamedTuple):
    """A batch with its queries and its KV; ``slots``: of the positions of each sequence."""

    sequences: list[AttentionSequence]
    query: Tensor
    layer: KVLayer
    settings: PlanSettings
    spec: AttentionSpec

    def kv_bytes(self) -> int:
        """That are read if each sequence's KV is read once."""
        heads, _, width = self.layer.key.shape
        return 2 * heads * width * self.layer.key.element_size() * sum(each.kv_len for each in self.sequences)

    def time(
        self, device: Device, *, share: bool = True, repeats: int = 20, before: Callable[[], object] | None = None
    ) -> Spread:
        """Device time of the kernels, with a plan that is there already."""
        plan = make_plan(self.sequences, dataclasses.replace(self.settings, share=share), device=device.name)
        run = partial(attend, self.query, self.layer, plan, self.spec)
        return device.seconds(run, repeats=repeats, before=before)

    def check(self, device: Device) -> None:
        """Compare some sequences that decode with torch's attention in float32.

        Raises:
            AssertionError: they differ.
        """
        plan = make_plan(self.sequences, self.settings, device=device.name)
        result = attend(self.query, self.layer, plan, self.spec)
        for number in {0, len(self.sequences) // 2, len(self.sequences) - 1}:
            sequence = self.sequences[number]
            key, value = (self._rows(pool, sequence) for pool in self.layer)
            query = self.query[sequence.query_start].float()[:, None]  # [H, 1, D]
            wanted = F.scaled_dot_product_attention(query, key, value, scale=self.spec.scale)[:, 0]
            compare(f"sequence {number}", result[sequence.query_start], wanted)

    def _rows(self, pool: Tensor, sequence: AttentionSequence) -> Tensor:
        """``[H, L, D]`` float32: a sequence's keys or values for each query head."""
        ranges = [torch.arange(run.start, run.start + run.length) for run in sequence.runs]
        slots = torch.cat(ranges)[: sequence.kv_len].to(pool.device)
        rows = pool.view(torch.uint8)[:, slots].view(pool.dtype)  # not every type can be indexed
        rows = dequantize_rows(rows) if pool.dtype == torch.int8 else rows.float()
        return rows.repeat_interleave(self.query.shape[1] // len(pool), 0)


def compare(what: str, result: Tensor, wanted: Tensor) -> None:
    """Raises ``AssertionError`` where ``result`` is not ``wanted``, nearly."""
    error = ((result.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
    if not error <= _TOLERANCE:
        raise AssertionError(f"{what}: the result differs from torch's by {error:.3g} of the largest value; no time of "
                             "this kernel means anything")  # fmt: skip


def make_case(
    device: Device,
    sizes: Sizes,
    batch: int,
    own: int,
    *,
    shared: int = 0,
    query_len: int = 1,
    form: str = "bf16",
    scattered: bool = False,
) -> Case:
    """``batch`` sequences of ``shared`` positions in common and ``own`` by themselves, whole blocks both, which lie
    side by side or in random order. ``query_len``: the last positions, which ask."""
    shape, slots = sizes.shape, shared + batch * own
    blocks = list(range(0, slots, BLOCK))
    if scattered:
        random.Random(0).shuffle(blocks)

    def runs(begin: int, end: int) -> tuple[SlotRun, ...]:
        if not scattered:
            return (SlotRun(begin, end - begin),) if end > begin else ()
        return tuple(SlotRun(start, BLOCK) for start in blocks[begin // BLOCK : end // BLOCK])

    length = shared + own
    sequences = [
        AttentionSequence(
            i * query_len, query_len, length, runs(0, shared) + runs(shared + i * own, shared + (i + 1) * own)
        )
        for i in range(batch)
    ]
    layer = KVLayer(*(_pool(device, (shape.kv_heads, slots, shape.head_dim), form) for _ in range(2)))
    query = torch.randn(batch * query_len, shape.heads, shape.head_dim, device=device.name).bfloat16()
    settings = device.ops().plan_settings(query.dtype, shape.heads, shape.kv_heads, shape.head_dim)
    return Case(sequences, query, layer, settings, AttentionSpec(shape.head_dim**-0.5))


def _pool(device: Device, shape: tuple[int, int, int], form: str) -> Tensor:
    """Random keys or values, head by head, as they take four times the room before."""

    def head() -> Tensor:
        rows = torch.randn(shape[1:], device=device.name)
        return quantize_rows(rows) if form == "int8" else rows.to(FORMS[form]).view(torch.uint8)

    return torch.stack([head() for _ in range(shape[0])]).view(FORMS[form])


def measure_decode(device: Device, sizes: Sizes, report: Report) -> None:
    """G1, and the same with KV in 8 bits."""
    bandwidth = report_bandwidth(device, sizes.copied, report)
    for form in FORMS:
        for scattered in (False, True):
            case = make_case(device, sizes, sizes.batch, sizes.tokens, form=form, scattered=scattered)
            case.check(device)
            share = case.time(device).under(case.kv_bytes() / bandwidth)
            what = (
                f"decoding, {sizes.batch} x {sizes.tokens:,}, {form} KV, {'scattered' if scattered else 'contiguous'}"
            )
            report.add(what, share, "of the copy", "G1" if form == "bf16" else "")
            del case


def measure_shared(device: Device, sizes: Sizes, report: Report) -> None:
    """G2."""
    bandwidth = report_bandwidth(device, sizes.copied, report)
    case = make_case(device, sizes, sizes.batch, sizes.tail, shared=sizes.shared, scattered=True)
    case.check(device)
    together, apart = case.time(device), case.time(device, share=False)
    what = f"decoding behind {sizes.shared:,} shared and {sizes.tail} own positions"
    report.add(f"{what}: the same batch unshared, times ours", apart.times(1 / together.median), "x", "G2")
    report.add(f"{what}: ours", together.times(1e6), "us")
    plan = draft_plan(case.sequences, case.settings)
    report.note(f"the shared plan brings in {plan.tiles_read:,} tiles of KV for {plan.tiles_used:,} that are used, in "
                f"{len(plan.arrays[0])} items of tiles of {plan.tile_rows} rows")  # fmt: skip
    del case
    copies = make_case(device, sizes, sizes.batch, sizes.shared + sizes.tail)
    alone = copies.time(device)
    report.add(f"{what}: unshared, each with KV of its own, times ours", alone.times(1 / together.median))
    report.add("that kernel", alone.under(copies.kv_bytes() / bandwidth), "of the copy")


def measure_prefill(device: Device, sizes: Sizes, report: Report) -> None:
    """G3: a chunk, against torch's flash attention, which has its keys and values side by side."""
    flops = matmul_flops(device, sizes.square)
    report.add(f"torch's bf16 product of {sizes.square} x {sizes.square}", flops.times(1e-12), "TFLOP/s")
    total = sizes.cached + sizes.new
    case = make_case(device, sizes, 1, total, query_len=sizes.new, scattered=True)
    contiguous = make_case(device, sizes, 1, total, query_len=sizes.new)
    query = contiguous.query.transpose(0, 1).unsqueeze(0).contiguous()  # [1, H, N, D]
    key, value = (pool.unsqueeze(0) for pool in contiguous.layer)  # [1, K, L, D]
    run, kind = _flash(device, query, key, value)
    plan = make_plan(contiguous.sequences, contiguous.settings, device=device.name)
    ours = attend(contiguous.query, contiguous.layer, plan, contiguous.spec)
    if _UNMASKED not in kind:
        compare("the chunk", ours, run()[0].transpose(0, 1))
    theirs = device.seconds(run)
    visible = sizes.new * sizes.cached + sizes.new * (sizes.new + 1) // 2
    work = 4 * sizes.shape.heads * sizes.shape.head_dim * visible
    report.add(f"torch's SDPA ({kind})", theirs.under(work / 1e12), "TFLOP/s")
    for name, each in (("scattered", case), ("contiguous", contiguous)):
        spread = each.time(device)
        what = f"chunk of {sizes.new:,} on {sizes.cached:,}, {name}"
        report.add(f"{what}: torch's time by ours", spread.under(theirs.median), "x", "G3")
        report.add(what, spread.under(work / 1e12), "TFLOP/s")


def _flash(device: Device, query: Tensor, key: Tensor, value: Tensor) -> tuple[Callable[[], Tensor], str]:
    """Torch's attention of the last queries over all positions, by its flash kernel, and what it computes.

    Fallbacks, since what the kernel takes differs between versions: a KV head for each query head, and no mask, which
    is a few per cent more work.
    """
    sdpa: Any = F.scaled_dot_product_attention
    group = query.shape[1] // key.shape[1]
    wide = [each.repeat_interleave(group, 1) for each in (key, value)]
    if device.rehearsal:  # the CPU's kernel has no such mask
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        return partial(sdpa, query, *wide, attn_mask=seen), "rehearsed"
    last = causal_lower_right(query.shape[2], key.shape[2])
    for kind, run in (
        ("flash, causal", partial(sdpa, query, key, value, attn_mask=last, enable_gqa=True)),
        ("flash, causal, KV of every head", partial(sdpa, query, *wide, attn_mask=last)),
        (f"flash, {_UNMASKED}", partial(sdpa, query, key, value, enable_gqa=True)),
        (f"flash, KV of every head, {_UNMASKED}", partial(sdpa, query, *wide)),
    ):
        forced = partial(_by_flash, run)
        try:
            forced()
        except RuntimeError as error:
            print(f"- not by {kind}: {str(error).splitlines()[0]}", flush=True)
        else:
            return forced, kind
    raise RuntimeError("torch's flash attention takes none of the forms that were tried")


def _by_flash(run: Callable[[], Tensor]) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return run()
