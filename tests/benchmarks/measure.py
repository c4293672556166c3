"""What a process uses, and what else the machine does, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for member in found:  # grows as it goes
        found += children.get(member, [])
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants; pages they share count once for each."""
    total = 0
    for member in family(pid):
        try:
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its descendants have used, those that ended included."""
    ticks = 0
    for member in family(pid):
        if fields := _stat(member):
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S


def busy_seconds() -> float:
    """CPU time that the whole machine has spent on anything, all processors added up."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]))
    idle, iowait = fields[3:5]
    return (sum(fields[:8]) - idle - iowait) / _TICKS_PER_S


def available_bytes() -> int:
    """Memory that can be given out without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []
