"""Copies of slots: as if done one after the other, in all layers, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.ops.protocol import SlotCopy
from foreword.ops.triton.copy import copy_slots, rounds

from .pages import DEVICE


def pool(slots: int, dtype: torch.dtype, width: int, start: int = 0) -> torch.Tensor:
    shape = (2, 2, 2, slots, width)
    count = 8 * slots * width
    return ((torch.arange(count) + start) % 251).to(torch.uint8).to(dtype).view(shape).to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 80), (torch.bfloat16, 64), (torch.int8, 132), (torch.float8_e4m3fn, 96)]
)
def test_copy_on_write(dtype: torch.dtype, width: int) -> None:
    """Some slots of a block, and a whole one of more words than a program copies."""
    data = pool(96, dtype, width)
    expected = data.clone().view(torch.uint8)
    for source, target, length in ((32, 64, 5), (3, 80, 16)):
        expected[..., target : target + length, :] = expected[..., source : source + length, :]
    copy_slots(data, data, [SlotCopy(32, 64, 5), SlotCopy(3, 80, 16)])
    assert torch.equal(data.view(torch.uint8), expected)


def test_between_two_pools() -> None:
    """To a smaller one and back to another place."""
    device, host = pool(64, torch.bfloat16, 64), pool(32, torch.bfloat16, 64, start=7)
    if DEVICE == "cuda":
        host = host.cpu().pin_memory()
    expected = host.cpu().clone()
    expected[..., 2:18, :] = device[..., 40:56, :].cpu()
    copy_slots(device, host, [SlotCopy(40, 2, 16)])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host.cpu(), expected)
    copy_slots(host, device, [SlotCopy(2, 0, 16)])
    assert torch.equal(device[..., :16, :], device[..., 40:56, :])


def test_one_after_the_other() -> None:
    """A copy of what another has written, and one over what another has read."""
    data = pool(64, torch.float32, 8)
    before = data.clone()
    copy_slots(data, data, [SlotCopy(0, 16, 4), SlotCopy(16, 32, 4), SlotCopy(48, 0, 4)])
    for target, source in ((16, 0), (32, 0), (0, 48)):
        assert torch.equal(data[..., target : target + 4, :], before[..., source : source + 4, :])
    copy_slots(data, data, [])


@given(st.lists(st.builds(SlotCopy, st.integers(0, 30), st.integers(0, 30), st.integers(1, 9)), max_size=8))
@settings(max_examples=200)
def test_rounds(copies: list[SlotCopy]) -> None:
    """Rounds keep the order, and in a round the order does not matter: all read before any writes.

    A copy onto itself moves nothing, and one that overlaps itself is done as a whole.
    """
    one, two = list(range(40)), list(range(40))
    for copy in copies:
        one[copy.target : copy.target + copy.length] = one[copy.source : copy.source + copy.length]
    done = list(rounds(copies))
    assert [copy for run in done for copy in run] == copies
    for run in done:
        before = two.copy()
        for copy in run:
            two[copy.target : copy.target + copy.length] = before[copy.source : copy.source + copy.length]
    assert one == two


def test_pools_that_differ_are_refused() -> None:
    """In dtype, in width; and rows that no word divides."""
    with pytest.raises(ValueError, match="give one geometry"):
        copy_slots(pool(4, torch.int8, 8), pool(4, torch.int8, 12), [SlotCopy(0, 1, 1)])
    with pytest.raises(ValueError, match="rows of 6 bytes"):
        copy_slots(pool(4, torch.int8, 6), pool(4, torch.int8, 6), [SlotCopy(0, 1, 1)])
