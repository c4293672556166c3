# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""A token of each row of logits, the most likely or a drawn one, found on the device: tokens are all that leaves it.

Nothing is sorted. Where top-k or top-p cut the order of likeliness is found by radix selection: the float32 logits as
32-bit integers that keep the order, a digit of 11, 11 and 10 bits after the other, each from a histogram of what the
row has under the digits found so far: of numbers of tokens for top-k, of their probability for top-p. A cut is a logit
and how many of the tokens that have just this one stay: the first of them, so that exactly k stay, or as many as top-p
needs. Then a token is drawn by inverse transform over what is kept, in ascending order of tokens.

Probabilities are integers: ``exp((logit - largest) / temperature)`` in units of 2**-44, so a token that is less likely
than that times the most likely one cannot be drawn. Sums of integers are the same in any order. So histograms may be
added up by atomic operations, rows may be split among programs, and a row's token has nothing to do with the batch.

Floor: the row is read once for its largest logit, 3 times for top-k, 4 times for top-p, and once for what is kept:
with top-p alone 6 times 4 V bytes, mostly from the L2 cache. A launch for each; the programs of a launch, 4,096 logits
each, are on many multiprocessors even for a single row. Slowest are rows whose logits are all alike, as atomic
operations on one bin wait for each other.

No GPU has run these kernels yet; they are tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from foreword.ops.protocol import Draw
from foreword.ops.transfer import upload

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096
"""Logits of a program."""
NUM_WARPS = 8
BINS = 2048
DIGITS = ((21, 11), (10, 11), (0, 10))
"""Of a key, from the first on: its lowest bit and its number of bits."""
_MOST_LOGITS = 2**19 - 1
_KEY_OF_NOTHING = 0xFF800000
"""The key of minus infinity: all tokens that can be drawn come before it."""

_UNIT = tl.constexpr(float(2**44))
_FIELDS = tl.constexpr(len(Draw._fields))


@triton.jit
def largest_kernel(logits, values, tokens, stride, width, BLOCK: tl.constexpr):
    """One program: ``BLOCK`` logits of row ``program_id(0)``; their largest value and where it is first.

    A NaN counts as infinity: either way the row's result is none.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < width, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    largest = tl.max(value, axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(values + place, largest)
    tl.store(tokens + place, tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0))


@triton.jit
def argmax_kernel(values, tokens, output, parts, PARTS: tl.constexpr):
    """One program: the parts of a row. ``output [R]``: the token, or -1 if its logit is not finite."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < parts
    value = tl.load(values + row * parts + part, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=inside, other=0x7FFFFFFF)
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0)
    tl.store(output + row, tl.where(tl.abs(largest) < float("inf"), first, -1))


@triton.jit
def to_key(logit):
    """uint32, the smaller the larger the logit; the same for both zeros."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def from_key(key):
    """The logit of a key."""
    return tl.where(key >= 0x80000000, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def load_part(logits, part, width, BLOCK: tl.constexpr):
    """Part ``part`` of a row, ``[BLOCK]`` each: which tokens there are, their logits, and the keys of these."""
    token = part * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + token, mask=token < width, other=float("-inf"))
    return token < width, logit, to_key(logit)


@triton.jit
def weigh(logit, largest, settings, MIN_P: tl.constexpr):
    """int64, at most 2**44: probability in relation to the most likely token's; of ``MIN_P``, 0 below ``min_p``."""
    temperature = tl.load(settings).to(tl.float32)
    weight = (tl.exp((logit - largest) / temperature) * _UNIT).to(tl.int64)
    if MIN_P:
        weight = tl.where(weight >= tl.ceil(tl.load(settings + 3) * _UNIT).to(tl.int64), weight, 0)
    return weight


@triton.jit
def kept_parts(cut, sums, largest, settings, parts, MIN_P: tl.constexpr, PARTS: tl.constexpr):
    """What is kept of each part of a row, ``[PARTS]`` int64: its weight, and how many tokens it has at the cut itself,
    of which the first of the row stay."""
    part = tl.arange(0, PARTS)
    above = tl.load(sums + part, mask=part < parts, other=0)
    ties = tl.load(sums + parts + part, mask=part < parts, other=0)
    before = tl.cumsum(ties, axis=0) - ties
    staying = tl.minimum(tl.maximum(tl.load(cut + 1) - before, 0), ties)
    return above + staying * weigh(from_key(tl.load(cut).to(tl.uint32)), largest, settings, MIN_P), ties


@triton.jit
def histogram_kernel(
    logits, best, settings, cut, bins, stride, width,
    BY_WEIGHT: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` logits of row ``program_id(0)``. Adds to ``bins [R, BINS]``, by the next digit of the key,
    what the tokens that have the first digits of ``cut`` weigh, or how many they are."""
    row = tl.program_id(0)
    first = tl.load(best + row)
    logits += row.to(tl.int64) * stride
    settings += row * _FIELDS
    if (first >= 0) & (tl.load(settings) > 0.0):
        inside, logit, key = load_part(logits, tl.program_id(1), width, BLOCK)
        if SHIFT + BITS < 32:
            inside &= (key >> (SHIFT + BITS)) == tl.load(cut + row * 2).to(tl.uint32)
        amount = tl.full((BLOCK,), 1, tl.int64)
        if BY_WEIGHT:
            amount = weigh(logit, tl.load(logits + first), settings, False)
        digit = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        tl.atomic_add(bins + row * BINS + digit, amount, mask=inside & (amount > 0), sem="relaxed")


@triton.jit
def cut_kernel(
    logits, best, settings, cut, bins, kept, sums, stride, width, parts,
    BY_WEIGHT: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, BINS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: a row's next digit, at which the histogram, added up, reaches what is wanted.

    ``cut [R, 2]``: the digits so far, and what is wanted of the tokens that have them; in the end, the key, and how
    many of the tokens that have it stay. At the first digit top-k tokens are wanted, or top-p of what is kept now:
    by the cut ``kept`` and the parts' ``sums``.
    """
    row = tl.program_id(0)
    first = tl.load(best + row)
    settings += row * _FIELDS
    cut += row * 2
    if (first >= 0) & (tl.load(settings) > 0.0):
        largest = tl.load(logits + row.to(tl.int64) * stride + first)
        digits = tl.full((), 0, tl.int64)
        if SHIFT + BITS < 32:
            digits = tl.load(cut)
            wanted = tl.load(cut + 1)
        elif BY_WEIGHT:
            weights, _ = kept_parts(kept + row * 2, sums + row * 2 * parts, largest, settings, parts, False, PARTS)
            total = tl.sum(weights, axis=0)
            share = tl.ceil(tl.load(settings + 2) * total.to(tl.float64)).to(tl.int64)
            wanted = tl.minimum(share, total)
        else:
            top_k = tl.load(settings + 1).to(tl.int64)
            wanted = tl.where((top_k > 0) & (top_k < width), top_k, width)
        number = tl.arange(0, BINS)
        amounts = tl.load(bins + row * BINS + number)
        digit = tl.sum((tl.cumsum(amounts, axis=0) < wanted).to(tl.int32), axis=0)
        wanted -= tl.sum(tl.where(number < digit, amounts, 0), axis=0)
        digits = (digits << BITS) | digit
        if BY_WEIGHT and SHIFT == 0:
            each = weigh(from_key(digits.to(tl.uint32)), largest, settings, False)
            wanted = (wanted + each - 1) // each
        tl.store(cut, digits)
        tl.store(cut + 1, wanted)


@triton.jit
def sum_kernel(logits, best, settings, cut, sums, stride, width, parts, MIN_P: tl.constexpr, BLOCK: tl.constexpr):
    """One program: a part of a row. ``sums [R, 2, parts]``: what its tokens before the cut weigh together, and how many
    it has at the cut."""
    row = tl.program_id(0)
    first = tl.load(best + row)
    logits += row.to(tl.int64) * stride
    settings += row * _FIELDS
    if (first >= 0) & (tl.load(settings) > 0.0):
        inside, logit, key = load_part(logits, tl.program_id(1), width, BLOCK)
        last = tl.load(cut + row * 2).to(tl.uint32)
        weight = tl.where(key < last, weigh(logit, tl.load(logits + first), settings, MIN_P), 0)
        sums += row * 2 * parts + tl.program_id(1)
        tl.store(sums, tl.sum(weight, axis=0))
        tl.store(sums + parts, tl.sum(((key == last) & inside).to(tl.int64), axis=0))


@triton.jit
def draw_kernel(logits, best, settings, cut, sums, stride, width, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """One program: a row's token, which replaces the most likely one in ``best``: the part in which the weights, added
    up, pass ``u`` of the whole, and the token in that part."""
    row = tl.program_id(0)
    first = tl.load(best + row)
    logits += row.to(tl.int64) * stride
    settings += row * _FIELDS
    cut += row * 2
    if (first >= 0) & (tl.load(settings) > 0.0):
        largest = tl.load(logits + first)
        weights, ties = kept_parts(cut, sums + row * 2 * parts, largest, settings, parts, True, PARTS)
        total = tl.sum(weights, axis=0)
        target = (tl.load(settings + 4) * total.to(tl.float64)).to(tl.int64)  # below the total, however it is rounded
        part = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
        before = tl.arange(0, PARTS) < part
        target -= tl.sum(tl.where(before, weights, 0), axis=0)
        staying = tl.load(cut + 1) - tl.sum(tl.where(before, ties, 0), axis=0)

        inside, logit, key = load_part(logits, part, width, BLOCK)
        last = tl.load(cut).to(tl.uint32)
        tied = (key == last) & inside
        kept = (key < last) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= staying))
        weight = tl.where(kept, weigh(logit, largest, settings, True), 0)
        place = tl.sum((tl.cumsum(weight, axis=0) <= target).to(tl.int32), axis=0)
        tl.store(best + row, part * BLOCK + place)


def part_constants(width: int, block: int = BLOCK) -> dict[str, int]:
    """The compile-time parameter of the kernels that read what is known of a row's parts."""
    return {"PARTS": triton.next_power_of_2(triton.cdiv(width, block))}


def argmax(logits: Tensor, block: int = BLOCK) -> Tensor:
    """``[R]`` int32: the index of the largest of each row of ``logits [R, V]`` float32, the first of equals; -1 where a
    NaN is or the largest is infinite. Nothing waits for the device."""
    rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = triton.cdiv(width, block)
    output = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
        tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
        largest_kernel[rows, parts](logits, values, tokens, logits.stride(0), width, BLOCK=block, num_warps=NUM_WARPS)
        argmax_kernel[rows,](values, tokens, output, parts, **part_constants(width, block), num_warps=1)
    return output


def draw(logits: Tensor, draws: Sequence[Draw], block: int = BLOCK) -> Tensor:
    """:meth:`foreword.ops.protocol.Ops.draw`; ``block``: logits of a program, a power of two.

    Raises:
        ValueError: a row has so many logits that sums of probabilities could overflow.
    """
    best = argmax(logits, block)
    if any(how.temperature for how in draws):
        Drawing(logits, best, draws, block).run()
    return best


class Drawing:
    """Rows that are drawn from.

    Attributes:
        best: ``[R]`` int32, the most likely tokens, or -1; :meth:`run` puts the drawn ones there.
        cut: ``[R, 2]`` int64, where each row is cut: a key, and how many of the tokens that have it stay besides all
            that come before.

    Raises:
        ValueError: as :func:`draw`.
    """

    def __init__(self, logits: Tensor, best: Tensor, draws: Sequence[Draw], block: int) -> None:
        self._rows, self._width = logits.shape
        if self._width > _MOST_LOGITS:
            raise ValueError(f"rows of {self._width} logits cannot be drawn from: {_MOST_LOGITS} are the most")
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        parts, self._device = triton.cdiv(self._width, block), logits.device
        self._draws = [how for how in draws if how.temperature]
        self.best = best
        self._inputs = (logits, best, upload(np.array(draws, np.float64), self._device))
        self._sizes = (logits.stride(0), self._width, parts)
        self._block = {"BLOCK": block}
        self._parts = part_constants(self._width, block)
        self._sums = torch.empty((self._rows, 2, parts), dtype=torch.int64, device=self._device)
        self.cut = torch.zeros((self._rows, 2), dtype=torch.int64, device=self._device)
        self.cut[:, 0] = _KEY_OF_NOTHING

    def run(self) -> None:
        """Cut by top-k, cut what is left by top-p, and draw from the rest."""
        if any(how.top_k for how in self._draws):
            self._find_cut(by_weight=False)
        if any(how.top_p < 1 for how in self._draws):
            self._add_up(min_p=False)
            self._find_cut(by_weight=True)
        self._add_up(min_p=True)
        draw_kernel[self._rows,](
            *self._inputs, self.cut, self._sums, *self._sizes, **self._block, **self._parts, num_warps=NUM_WARPS
        )

    def _find_cut(self, *, by_weight: bool) -> None:
        bins = torch.zeros((len(DIGITS), self._rows, BINS), dtype=torch.int64, device=self._device)
        cut = torch.empty((self._rows, 2), dtype=torch.int64, device=self._device)
        for (shift, bits), counted in zip(DIGITS, bins, strict=True):
            digit: dict[str, Any] = {"BY_WEIGHT": by_weight, "SHIFT": shift, "BITS": bits, "BINS": BINS}
            histogram_kernel[self._rows, self._sizes[-1]](
                *self._inputs, cut, counted, *self._sizes[:2], **digit, **self._block, num_warps=NUM_WARPS
            )
            cut_kernel[self._rows,](
                *self._inputs, cut, counted, self.cut, self._sums, *self._sizes, **digit, **self._parts,
                num_warps=NUM_WARPS,
            )  # fmt: skip
        self.cut = cut

    def _add_up(self, *, min_p: bool) -> None:
        sum_kernel[self._rows, self._sizes[-1]](
            *self._inputs, self.cut, self._sums, *self._sizes, MIN_P=min_p, **self._block, num_warps=NUM_WARPS
        )
