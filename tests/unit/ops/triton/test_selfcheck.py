"""The check that device="auto" makes before it takes a GPU: passes, finds what is wrong, and is made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.ops.triton import attention, kv_write, selfcheck
from foreword.ops.triton.selfcheck import check_kernels, find_fault

from .pages import DEVICE


def test_kernels_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What has passed is not run again, even if it would fail now; the wait for it is announced."""
    caplog.set_level("INFO")
    assert find_fault(DEVICE, torch.float32, tmp_path) is None
    wrong_scale(monkeypatch)
    assert find_fault(DEVICE, torch.float32, tmp_path) is None
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [f"checking the kernels on {DEVICE}"]


def test_a_fault_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kind of error it is."""
    monkeypatch.setattr(attention, "attention_kernel", None)
    for _ in range(2):
        fault = find_fault(DEVICE, torch.float32, tmp_path)
        assert fault is not None
        assert fault.startswith("TypeError: ")


def test_a_gpu_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a child that was forked from a process which uses it."""

    def refuse(_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    monkeypatch.setattr(selfcheck, "INTERPRETED", False)
    assert find_fault("cuda", torch.bfloat16, tmp_path) == "RuntimeError: planted"


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LOG2_E", 1.4)


def wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kv_write._launch
    monkeypatch.setattr(
        kv_write,
        "_launch",
        lambda *args: original(*args[:4], args[4].clamp(max=321) if args[4] is not None else None, *args[5:]),
    )


@pytest.mark.parametrize(
    ("plant", "found"),
    [(wrong_scale, "attention of prompts: off by"), (wrong_slots, "attention of prompts: off by")],
)
def test_what_is_wrong_is_found(plant: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(RuntimeError, match=found):
        check_kernels(DEVICE, torch.float32)
