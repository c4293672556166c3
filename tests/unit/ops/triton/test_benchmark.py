"""The benchmark's cases: that they are what they say, and that its checks see a wrong kernel."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.attention import FORMS, make_case
from benchmarks.gpu.device import Device
from benchmarks.gpu.host import measure_copies
from benchmarks.gpu.products import FORMS as WEIGHTS
from benchmarks.gpu.products import packed
from benchmarks.gpu.results import Report
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.sizes import Sizes
from foreword.ops.triton.numeric import INTERPRETED
from foreword.ops.triton.planner import draft_plan

SIZES = Sizes(SHAPES["tiny"], 2, 32, 256, 16, 8, 8, (1,), 1024, 16, 1)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(INTERPRETED)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_is_checked(device: Device, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right with each kind of KV; a kernel that gives something else is noticed."""
    case = make_case(device, SIZES, 2, 32, form=form, scattered=True)
    assert case.kv_bytes() == 2 * 2 * 2 * 32 * {"bf16": 32, "int8": 20, "fp8": 16}[form]
    case.check(device)
    monkeypatch.setattr(attention, "attend", lambda query, *_: torch.zeros_like(query))
    with pytest.raises(AssertionError, match="sequence 0: the result differs"):
        case.check(device)


def test_a_shared_beginning_is_shared(device: Device) -> None:
    """In the batch as it lies in the pool; its plan reads the beginning once."""
    case = make_case(device, SIZES, 3, 16, shared=256, scattered=True)
    assert len({sequence.runs[:16] for sequence in case.sequences}) == 1
    slots = {run.start for sequence in case.sequences for run in sequence.runs}
    assert slots == set(range(0, 256 + 3 * 16, 16))
    plan = draft_plan(case.sequences, case.settings)
    assert (plan.tiles_used, plan.tiles_read) == (9, 5)


@pytest.mark.parametrize("form", WEIGHTS)
def test_weights_are_packed_as_their_values(form: str) -> None:
    weight = torch.randn(64, 64) * 0.02
    layout, values = packed(form, weight)
    assert layout.shape == (64, 64)
    assert (values - weight).abs().max() < (0.01 if form == "int4" else 0.005)
    assert layout.form == ("plain" if form == "exact" else form)


def test_copies_are_measured_both_ways(device: Device) -> None:
    """All of it runs, and what was copied is compared."""
    report = Report(device.rehearsal)
    measure_copies(device, SIZES, report)
    assert [line.measure.split(",")[0] for line in report.lines][:3:2] == ["blocks to the host", "blocks to the device"]
    assert len(report.lines) == 6
