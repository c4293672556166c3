"""What a result was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_TELLING_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")


def multiplies_bf16() -> bool:
    """Whether the processor has instructions for bfloat16 products; without them peers fall to paths made for none."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_fields_and_flags()[1])


def describe() -> dict[str, Any]:
    """Processor, memory, system, and the commit that was measured."""
    fields, flags = _fields_and_flags()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "cpus": os.cpu_count(),
        "flags": flags,
        "telling_flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "commit": _commit(),
    }


def _fields_and_flags() -> tuple[dict[str, str], list[str]]:
    """What the system says of the last processor, and its instruction sets."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    fields = {key.strip(): value.strip() for key, value in lines}
    return fields, (fields.get("flags") or fields.get("Features") or "").split()


def _commit() -> str:
    """The commit checked out, with "+" if files differ from it; empty outside a repository."""
    try:
        git = ["git", "-C", str(HERE)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def describe_gpu() -> str:
    """The GPU that torch uses, its driver and clocks, what else runs there, and versions; in words."""
    import torch
    import triton

    versions = (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}, "
        f"Python {platform.python_version()}"
    )
    if not torch.cuda.is_available():
        return f"No GPU, {versions}"
    found = torch.cuda.get_device_properties(0)
    size = f"{found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors"
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,utilization.gpu"
    state = _nvidia_smi("--query-gpu=" + fields, "--format=csv,noheader", "--id=0")
    told = f"; {fields}: {state}" if state else ""
    return f"{found.name} ({size}{told}), {versions}"


def _nvidia_smi(*arguments: str) -> str:
    """What the tool says; empty where it is not there."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
