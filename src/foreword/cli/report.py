"""What calls cost, as a table, and how far a prompt is, as a progress bar."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from foreword.core.outputs import Usage

if TYPE_CHECKING:
    from foreword import Engine

_HEADINGS = ("call", "prompt", "cached", "computed", "answer", "first token", "tokens/s")


@contextlib.contextmanager
def prefill_progress(engine: Engine, what: str, num_tokens: int) -> Iterator[None]:
    """Show how many of ``num_tokens`` prompt tokens are computed, if the work inside takes more than two seconds."""
    from tqdm import tqdm

    done, start = threading.Event(), engine.stats().tokens_prefilled

    def show() -> None:
        with tqdm(total=num_tokens, desc=what, unit="token", delay=2, leave=False, disable=None) as bar:
            while not done.wait(0.2):
                bar.update(min(num_tokens, engine.stats().tokens_prefilled - start) - bar.n)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class UsageTable:
    """Collects the usage of calls and prints it with totals.

    Example:
        >>> table = UsageTable()
        >>> table.add("hello", Usage(prompt_tokens=30, cached_tokens=24, completion_tokens=8))
        >>> print(table)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Usage]] = []
        self._start_s = time.monotonic()

    def add(self, label: str, usage: Usage) -> None:
        self._calls.append((label, usage))

    def __str__(self) -> str:
        rows = [_HEADINGS, *(_row(label, usage) for label, usage in self._calls), self._totals()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], self._verdict()])

    def _sum(self, field: str) -> int:
        return sum(getattr(usage, field) for _, usage in self._calls)

    def _totals(self) -> tuple[str, ...]:
        """Sums; of the time to the first token the mean; all generated tokens over the time since the table began."""
        prompt, cached, answer = (self._sum(f) for f in ("prompt_tokens", "cached_tokens", "completion_tokens"))
        waits = [usage.time_to_first_token_s for _, usage in self._calls if usage.time_to_first_token_s is not None]
        mean = f"mean {1000 * sum(waits) / len(waits):,.0f} ms" if waits else ""
        rate = answer / (time.monotonic() - self._start_s)
        calls = "one call" if len(self._calls) == 1 else f"all {len(self._calls)} calls"
        return (calls, f"{prompt:,}", f"{cached:,}", f"{prompt - cached:,}", f"{answer:,}", mean, f"{rate:.1f}")

    def _verdict(self) -> str:
        prompt, cached = self._sum("prompt_tokens"), self._sum("cached_tokens")
        share = cached / prompt if prompt else 0.0
        return f"{share:.0%} of all prompt tokens were reused instead of computed."


def summary(usage: Usage) -> str:
    """What one call cost, in a line."""
    rate, first = usage.tokens_per_second, usage.time_to_first_token_s
    parts = [f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused"]
    if first is not None:
        parts.append(f"first token after {first * 1000:.0f} ms")
    if rate is not None:
        parts.append(f"{rate:.0f} tokens/s")
    return "[" + ", ".join(parts) + "]"


def _row(label: str, usage: Usage) -> tuple[str, ...]:
    first, rate = usage.time_to_first_token_s, usage.tokens_per_second
    return (
        label,
        f"{usage.prompt_tokens:,}",
        f"{usage.cached_tokens:,}",
        f"{usage.prompt_tokens - usage.cached_tokens:,}",
        f"{usage.completion_tokens:,}",
        "" if first is None else f"{first * 1000:,.0f} ms",
        "" if rate is None else f"{rate:.1f}",
    )
