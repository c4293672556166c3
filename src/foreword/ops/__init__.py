"""The compute primitives behind one protocol."""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from foreword.ops.protocol import Ops

logger = logging.getLogger("foreword")


def create_ops(
    device: str,
    dtype: torch.dtype,
    kernels: str = "auto",
    quantized: bool = False,
    num_threads: int | None = None,
    *,
    block_size: int = 16,
    deterministic: bool = False,
) -> Ops:
    """The backend for ``device``, computing in ``dtype``.

    Args:
        kernels: on the CPU, the instruction set of the native kernels, ``"torch"`` for none of them, ``"auto"`` for the
            best there are, or ``"triton"`` under Triton's interpreter; on a GPU ``"triton"`` or ``"auto"``.
        quantized: weights will be quantised; if not, bfloat16 products are oneDNN's where the processor has them.
        num_threads: on the CPU; None takes torch's.
        block_size: slots of the KV pool that lie side by side for certain, on a GPU.
        deterministic: on a GPU, bits do not depend on the batch; on the CPU they never do.

    Raises:
        ValueError: there is no backend for the device, the dtype or the kernels, or it cannot run here.
    """
    kind = device.partition(":")[0]
    if kind == "cuda" or (device == "cpu" and kernels == "triton"):
        _check_triton(device, kernels)
        from foreword.ops.triton.backend import TritonOps

        return TritonOps(dtype, device, block_size=block_size, deterministic=deterministic)
    if device == "cpu":
        chosen = native_kernels() if kernels == "auto" else kernels
        if chosen is None or chosen == "torch":
            from foreword.ops.cpu import CpuOps

            return CpuOps(dtype, num_threads)
        from foreword.ops.cpu.native import NativeOps

        fast = str(dtype) == "torch.bfloat16" and _has_fast_bfloat16()
        return NativeOps(dtype, chosen, num_threads, onednn=fast and not quantized)
    raise ValueError(f"device={device!r} is not supported: use 'auto', 'cpu' or 'cuda'")


def choose_device(device: str, kernels: str, directory: Path) -> str:
    """What ``device="auto"`` means: a GPU that torch finds and on which Triton's kernels pass their check, unless
    ``kernels`` are for the CPU; else the CPU.

    Args:
        directory: remembers that a GPU has passed the check.
    """
    if device != "auto":
        return device
    if kernels not in ("auto", "triton") or not _has_triton():
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    from foreword.ops.triton.selfcheck import find_fault

    fault = find_fault("cuda", torch.bfloat16, directory)
    if fault is None:
        return "cuda"
    logger.warning(
        "device='auto' stays on the CPU, as the kernels for the GPU do not pass their check: %s; device='cuda' takes "
        "the GPU all the same", fault,
    )  # fmt: skip
    return "cpu"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check_triton(device: str, kernels: str) -> None:
    """Whether Triton's kernels can run on ``device``."""
    import torch

    if kernels not in ("auto", "triton"):
        raise ValueError(f"kernels={kernels!r} are for the CPU, not for device={device!r}; use 'auto' or 'triton'")
    if not _has_triton():
        raise ValueError(f"device={device!r} with Triton's kernels needs the package triton, which is not installed; "
                         "get it with: pip install 'foreword[gpu]'")  # fmt: skip
    from foreword.ops.triton.numeric import INTERPRETED

    if device == "cpu":
        if not INTERPRETED:
            raise ValueError("kernels='triton' on device='cpu' run in Triton's interpreter only, which is for tests: "
                             "set TRITON_INTERPRET=1 before Python starts, or use kernels='auto'")  # fmt: skip
    elif not torch.cuda.is_available():
        reason = (
            "has no CUDA in it; install a CUDA build of torch on a machine with an NVIDIA GPU"
            if torch.version.cuda is None
            else "finds no NVIDIA GPU, or no driver for it; see what nvidia-smi says"
        )
        raise ValueError(f"device={device!r} is not there: torch {torch.__version__} {reason}, or use device='cpu'")
    elif not re.fullmatch(r"cuda(:\d+)?", device):
        raise ValueError(f"device={device!r} names no GPU: give 'cuda', or 'cuda:0' and so on")
    elif (count := torch.cuda.device_count()) <= int(device[len("cuda:") :] or 0):
        raise ValueError(f"device={device!r} is not there: there are {count}, the first is 'cuda:0'")
    elif INTERPRETED:
        raise ValueError(f"device={device!r}: TRITON_INTERPRET is set, so the kernels would run in Triton's "
                         "interpreter; unset it before Python starts")  # fmt: skip


def native_kernels() -> str | None:
    """The best native kernels for this processor; None when the package was built without a C compiler."""
    from foreword.ops.cpu.native.library import available

    return available()[0] if available() else None


def default_dtype(device: str, kernels: str = "auto") -> torch.dtype:
    """What ``dtype="auto"`` computes in, whatever the checkpoint holds.

    bfloat16 where the device reads it fast, else float32. float16 is never chosen: on the CPU its products run
    tens of times slower than either.
    """
    import torch

    if device == "cpu" and kernels == "triton":
        return torch.float32  # the interpreter's bfloat16 is cut instead of rounded
    if device != "cpu" or (kernels != "torch" and native_kernels()):
        return torch.bfloat16
    from foreword.ops.cpu.linear import mkldnn_packs

    return torch.bfloat16 if _has_fast_bfloat16() and mkldnn_packs(torch.bfloat16) else torch.float32


def _has_fast_bfloat16() -> bool:
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if capabilities:
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(check() for check in checks if check is not None)
