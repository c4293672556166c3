"""How far two sequences begin alike."""

from __future__ import annotations

Items = list[int] | tuple[int, ...] | bytes | str


def common_prefix_length(a: Items, a_start: int, b: Items, b_start: int, limit: int) -> int:
    """How many items of ``a[a_start:]`` and ``b[b_start:]`` agree from the start, at most ``limit``."""
    low, high = 0, max(0, min(len(a) - a_start, len(b) - b_start, limit))
    if a[a_start : a_start + high] == b[b_start : b_start + high]:  # slices compare at C speed
        return high
    while high - low > 1:  # the first difference lies in [low, high)
        middle = (low + high) // 2
        if a[a_start + low : a_start + middle] == b[b_start + low : b_start + middle]:
            low = middle
        else:
            high = middle
    return low
