"""Tables from the runs: medians, ours against the best peer next to the targets, the spread. All are Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from foreword.cli.bench import number
from foreword.cli.workloads import GROWTH, WORKLOADS

from .targets import TARGETS, Target
from .turns import FRESH, Record

OURS = "foreword:"
TITLES = {name: (each.title, each.unit) for name, each in (WORKLOADS | GROWTH).items()} | FRESH

DISTURBED = 0.1
"""Share of the processors that other processes may use during a run that counts."""

Medians = dict[str, dict[str, float]]
"""By workload and entry."""


def render(result: Record) -> str:
    """Everything a reader of the result wants, as Markdown."""
    values = medians(result["records"])
    parts = [
        _heading(result),
        _section("Medians", _median_table(values, [*FRESH, *WORKLOADS])),
        _section("Ours against the best peer", _target_table(values)),
        _section("Growth, W4 in tok/s", _median_table(values, GROWTH)),
        _section("Growth, ours against the best peer", _growth_table(values)),
        _section("Every workload", _spread_table(result["records"])),
        _section("Setup", _setup(result)),
    ]
    return "\n\n".join(part for part in parts if part)


def medians(records: Iterable[Record]) -> Medians:
    """The median of the runs without errors and undisturbed by others; an entry that had none is left out."""
    runs: dict[str, dict[str, list[float]]] = {}
    for record in records:
        if not record["errors"] and record.get("others_cpu", 0) <= DISTURBED:
            runs.setdefault(record["workload"], {}).setdefault(record["engine"], []).append(record["value"])
    return {
        workload: {engine: statistics.median(values) for engine, values in by_engine.items()}
        for workload, by_engine in runs.items()
    }


def best(workload: str, values: dict[str, float], wanted: Callable[[str], bool]) -> str | None:
    """The best of the wanted entries; None if there is none."""
    names = [name for name in values if wanted(name)]
    better = max if higher_is_better(workload) else min
    return better(names, key=values.__getitem__) if names else None


def higher_is_better(workload: str) -> bool:
    return TITLES[workload][1] == "tok/s"


def compare(target: Target, values: dict[str, float]) -> tuple[str | None, str | None, float | None]:
    """Our entry, the peer it is compared with, and ours ÷ peer's or, for an absolute target, ours."""
    peer = target.peer if target.peer in values else None
    if target.peer is None:
        peer = best(target.workload, values, lambda name: not is_ours(name))
    ours = best(target.workload, values, lambda name: is_ours(name) and target.ours in (None, name))
    if ours is None:
        return None, peer, None
    if target.unit:
        return ours, peer, values[ours]
    return ours, peer, None if peer is None else values[ours] / values[peer]


def is_ours(entry: str) -> bool:
    return entry.startswith(OURS)


def table(rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """An aligned Markdown table; the first row is its heading, columns after ``text_columns`` hold numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = (
            c.ljust(w) if i < text_columns else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(rows[0]), f"| {' | '.join(rule)} |", *map(line, rows[1:])])


def _heading(result: Record) -> str:
    machine, loads = result["machine"], [record["load_before"][0] for record in result["records"]]
    used = [record["others_cpu"] for record in result["records"] if "others_cpu" in record]
    lines = [
        f"{result['date']}, commit {machine['commit'] or 'unknown'}: `{result['command']}`",
        f"{machine['cpu']}, {machine['cpus']} CPUs ({', '.join(machine['telling_flags'])}), "
        f"{machine['memory_gib']} GiB; {result['threads']} threads; {machine['system']}",
    ]
    if loads:
        lines.append(f"Load average before the runs: {min(loads):.2f} to {max(loads):.2f}.")
    if used:
        middle = statistics.median(used)
        lines[-1] += f" Other processes used {middle:.0%} of the CPUs in the median, {max(used):.0%} at most."
        if out := sum(share > DISTURBED for share in used):
            lines[-1] += f" Left out of the medians, because of more than {DISTURBED:.0%}: {out} of {len(used)} runs."
    return "\n".join(lines + result["skipped"])


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _median_table(values: Medians, workloads: Iterable[str]) -> str:
    """One row per entry, one column per workload."""
    columns = [name for name in workloads if name in values]
    if not columns:
        return ""
    entries = dict.fromkeys(entry for name in columns for entry in values[name])
    rows = [["", *(f"{name}, {TITLES[name][1]}" for name in columns)]]
    for entry in entries:
        rows.append([entry, *(number(values[c][entry]) if entry in values[c] else "" for c in columns)])
    return table(rows)


def _target_table(values: Medians) -> str:
    rows = [["workload", "ours", "best peer", "ours, median", "peer's", "ours ÷ peer", "target", "met"]]
    for target in TARGETS:
        if target.workload not in values:
            continue
        here = values[target.workload]
        ours, peer, value = compare(target, here)
        verdict = "" if value is None else "yes" if target.met(value) else "no"
        ratio = "" if ours is None or peer is None else f"{here[ours] / here[peer]:.2f}"
        numbers = [number(here[name]) if name else "" for name in (ours, peer)]
        rows.append([target.workload, ours or "none", peer or "none", *numbers, ratio, str(target), verdict])
    return table(rows, 3) if len(rows) > 1 else ""


def _growth_table(values: Medians) -> str:
    rows = [["workload", "ours", "best peer", "ours, median", "peer's", "ours ÷ peer"]]
    for name in GROWTH:
        here = values.get(name, {})
        ours, peer = best(name, here, is_ours), best(name, here, lambda entry: not is_ours(entry))
        if ours and peer:
            ratio = f"{here[ours] / here[peer]:.2f}"
            rows.append([TITLES[name][0], ours, peer, number(here[ours]), number(here[peer]), ratio])
    return table(rows, 3) if len(rows) > 1 else ""


def _spread_table(records: Sequence[Record]) -> str:
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["workload"], record["engine"]), []).append(record)
    counted = medians(records)
    rows = [["workload", "engine", "median", "min", "max", "unit", "runs", "failed", "load", "others' CPU"]]
    for (workload, engine), group in groups.items():
        values = [record["value"] for record in group]
        middle = counted.get(workload, {}).get(engine)
        spread = ["" if middle is None else number(middle), number(min(values)), number(max(values))]
        load = max(record["load_before"][0] for record in group)
        others = f"{max(r['others_cpu'] for r in group):.0%}" if "others_cpu" in group[0] else ""
        failed = str(sum(record["errors"] for record in group))
        rows.append([workload, engine, *spread, group[0]["unit"], str(len(group)), failed, f"{load:.2f}", others])
    return table(rows, 2) if records else ""


def _setup(result: Record) -> str:
    """How each entry was set up, and what it answered to the question that all were asked."""
    lines = [f"Asked: {result['question']}", ""]
    for entry, about in result["about"].items():
        versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
        lines.append(f"- {entry}: {about['notes']}. {versions}. Answered: {about['text']!r}")
    lines += [f"- FAILED {each['engine']} on {each['workload']}: {each['error']}" for each in result["failures"]]
    return "\n".join(lines)
