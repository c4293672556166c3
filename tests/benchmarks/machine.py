"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .catalogue import HERE

_TELLING_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")


def describe() -> dict[str, Any]:
    """Processor, memory, system, and the commit that was measured."""
    info = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in info.items()}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cpus": os.cpu_count(),
        "flags": flags,
        "telling_flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit checked out, with "+" if files differ from it; empty outside a repository."""
    try:
        git = ["git", "-C", str(HERE)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
