"""What calls cost, as a table."""

from __future__ import annotations

from foreword.core.outputs import Usage

_HEADINGS = ("call", "prompt", "cached", "computed", "first token", "tokens/s")


class UsageTable:
    """Collects the usage of calls and prints it with totals.

    Example:
        >>> table = UsageTable()
        >>> table.add("hello", Usage(prompt_tokens=30, cached_tokens=24, completion_tokens=8))
        >>> print(table)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Usage]] = []

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
        prompt, cached = self._sum("prompt_tokens"), self._sum("cached_tokens")
        return (f"{len(self._calls)} calls", f"{prompt:,}", f"{cached:,}", f"{prompt - cached:,}", "", "")

    def _verdict(self) -> str:
        prompt, cached = self._sum("prompt_tokens"), self._sum("cached_tokens")
        share = cached / prompt if prompt else 0.0
        return f"{share:.0%} of all prompt tokens were not computed again."


def _row(label: str, usage: Usage) -> tuple[str, ...]:
    first, rate = usage.time_to_first_token_s, usage.tokens_per_second
    return (
        label,
        f"{usage.prompt_tokens:,}",
        f"{usage.cached_tokens:,}",
        f"{usage.prompt_tokens - usage.cached_tokens:,}",
        "" if first is None else f"{first * 1000:,.0f} ms",
        "" if rate is None else f"{rate:.1f}",
    )
