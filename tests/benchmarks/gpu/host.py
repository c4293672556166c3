"""What the host does: planning a step, launching kernels, and copies between its memory and the device's."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from foreword.kv.pool import KVGeometry, KVPool
from foreword.ops.protocol import SlotCopy
from foreword.ops.triton import norms
from foreword.ops.triton.copy import copy_slots
from foreword.ops.triton.planner import draft_plan

from .attention import make_case
from .device import Device
from .sizes import BLOCK, Sizes

if TYPE_CHECKING:
    from .results import Report

_LAUNCHES = 200


def measure(device: Device, sizes: Sizes, report: Report) -> None:
    """Planning and launching; by the clock."""
    repeats = 2 if device.rehearsal else 20
    cases = {
        "by themselves": make_case(device, sizes, sizes.batch, sizes.tokens, scattered=True),
        "behind a shared beginning": make_case(device, sizes, sizes.batch, sizes.tail, shared=sizes.shared),
    }
    for name, case in cases.items():
        spread = device.wall(partial(draft_plan, case.sequences, case.settings), repeats=repeats)
        report.add(f"planning a step of {sizes.batch}, {name}", spread.times(1e6), "us")
        draft = draft_plan(case.sequences, case.settings)
        spread = device.wall(partial(draft.place, device.name), repeats=repeats)
        report.add("bringing that plan to the device", spread.times(1e6), "us")
    x = torch.ones(1, sizes.shape.hidden, device=device.name).bfloat16()
    count = 2 if device.rehearsal else _LAUNCHES
    device.wait()
    begin = time.perf_counter()
    for _ in range(count):
        norms.rms_norm(x, x[0], 1e-5)
    seconds = (time.perf_counter() - begin) / count
    device.wait()
    report.add("the host's time of one launch, its output tensor included", seconds * 1e6, "us")


def measure_copies(device: Device, sizes: Sizes, report: Report) -> None:
    """Blocks to the host tier and back, beside torch's own copies of pinned memory; and decoding meanwhile."""
    shape = sizes.shape
    geometry = KVGeometry(shape.layers, shape.kv_heads, shape.head_dim, torch.bfloat16)
    pool = KVPool(geometry, sizes.blocks, BLOCK, device.name)
    host = KVPool(geometry, sizes.blocks, BLOCK, pinned=not device.rehearsal)
    copies = [SlotCopy(n * BLOCK, (sizes.blocks - 1 - n) * BLOCK, BLOCK) for n in range(sizes.blocks)]
    size = sizes.blocks * BLOCK * geometry.bytes_per_token
    repeats = 1 if device.rehearsal else 5
    pool.data.normal_()
    ways = {"to the host": (pool, host), "to the device": (host, pool)}
    for name, (source, target) in ways.items():
        target.data.zero_()
        copy = partial(copy_slots, source.data, target.data, copies)
        copy()
        device.wait()
        for one in (copies[0], copies[-1]):
            moved, wanted = (
                pool.data[:, :, :, first : first + BLOCK].cpu()
                for pool, first in ((target, one.target), (source, one.source))
            )
            assert torch.equal(moved, wanted), f"copies {name} are wrong; no time of them means anything"
        spread = device.wall(copy, repeats=repeats)
        report.add(f"blocks {name}, {size / 1e9:.2f} GB", spread.under(size / 1e9), "GB/s")
        torchs = device.wall(partial(target.data.copy_, source.data, non_blocking=True), repeats=repeats)
        report.add(f"torch's copy of all of it {name}", torchs.under(size / 1e9), "GB/s")
    case = make_case(device, sizes, sizes.batch, sizes.tokens)
    alone = case.time(device)
    for name, (source, target) in ways.items():
        side = None if device.rehearsal else torch.cuda.Stream()
        begin = partial(_copy_aside, side, source.data, target.data, copies)
        meanwhile = case.time(device, repeats=8, before=begin)
        if side is not None and side.query():
            report.note(f"copies {name} were over before decoding was: the time meanwhile is partly of decoding alone")
        device.wait()
        report.add(f"decoding while blocks go {name}, times as long", meanwhile.times(1 / alone.median))


def _copy_aside(
    side: torch.cuda.Stream | None, source: torch.Tensor, target: torch.Tensor, copies: list[SlotCopy]
) -> None:
    """Have blocks copied for some hundred milliseconds, on a stream of their own where there are such."""
    with nullcontext() if side is None else torch.cuda.stream(side):
        for _ in range(1 if side is None else 4):
            copy_slots(source, target, copies)
