"""Measured numbers, their targets, and the sections of the results' file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from foreword.cli.bench import number

from ..report import table
from ..targets import Target

GOALS = {
    "G1": Target("G1", 0.85, at_least=True),
    "G2": Target("G2", 20, at_least=True),
    "G3": Target("G3", 0.6, at_least=True),
    "G4": Target("G4", 0.8, at_least=True),
    "G5": Target("G5", 0.7, at_least=True),
    "G6": Target("G6", 2.5, at_least=True),
    "G7 generate": Target("G7", 10, at_least=True),
    "G7 continuous": Target("G7", 5, at_least=True),
    "G8": Target("G8", 1.5),
}
"""Ratios. G1: of the copy bandwidth; G2, G6, G7: how many times faster; G3, G4, G5: the time of the other, or of the
floor, by ours; G8: ours by the floor."""


class Spread(NamedTuple):
    """Seconds, or what follows from them: the median of all runs, the least and the most."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> Spread:
        return Spread(*(factor * each for each in self))

    def under(self, amount: float) -> Spread:
        """``amount`` by each."""
        return Spread(amount / self.median, amount / self.high, amount / self.low)


_COLUMNS = ["measure", "value", "unit", "range", "target", "met"]


class Line(NamedTuple):
    """One number; ``goal``: which of :data:`GOALS` it is held against."""

    measure: str
    value: float | Spread
    unit: str = "x"
    goal: str = ""

    def cells(self, rehearsal: bool) -> list[str]:
        spread = self.value if isinstance(self.value, Spread) else None
        middle = self.value if not isinstance(self.value, Spread) else self.value.median
        around = "" if spread is None else f"{number(spread.low)} to {number(spread.high)}"
        target = GOALS.get(self.goal)
        met = "" if target is None else "rehearsal" if rehearsal else "yes" if target.met(middle) else "no"
        return [self.measure, number(middle), self.unit, around, "" if target is None else f"{self.goal} {target}", met]


@dataclass
class Report:
    """What a group of measurements found; lines are shown as they come."""

    rehearsal: bool
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)

    def add(self, measure: str, value: float | Spread, unit: str = "x", goal: str = "") -> None:
        self.lines.append(Line(measure, value, unit, goal))
        if len(self.lines) == 1:
            print(table([_COLUMNS]))
        print(f"| {' | '.join(self.lines[-1].cells(self.rehearsal))} |", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"- {text}", flush=True)

    def tabulate(self, title: str, rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
        self.tables.append(f"{title}:\n\n{table(rows, text_columns)}")
        print(f"\n{self.tables[-1]}\n", flush=True)

    def render(self, heading: str) -> str:
        rows = [["measure", "value", "unit", "range", "target", "met"]]
        rows += [line.cells(self.rehearsal) for line in self.lines]
        parts = [
            heading,
            table(rows) if self.lines else "",
            *self.tables,
            "\n".join(f"- {note}" for note in self.notes),
        ]
        return "\n\n".join(part for part in parts if part)


def write_section(file: Path, name: str, body: str) -> None:
    """Put ``body`` in the place of the section ``name`` of a Markdown file, or behind all others."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n### {name}\n\n{body}\n{end}"
    text = file.read_text() if file.exists() else ""
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    there = pattern.search(text)
    file.write_text(pattern.sub(lambda _: section, text) if there else f"{text.rstrip()}\n\n{section}\n".lstrip())
