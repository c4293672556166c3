"""The check that device="auto" makes before it takes a GPU: passes, finds what is wrong, and is made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreword.ops.triton import attention, kv_write
from foreword.ops.triton.selfcheck import check_kernels

from .pages import DEVICE


def test_kernels_are_right() -> None:
    check_kernels(DEVICE, torch.float32)


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
