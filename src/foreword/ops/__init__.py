"""The compute primitives behind one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from foreword.ops.protocol import Ops


def create_ops(
    device: str, dtype: torch.dtype, kernels: str = "auto", quantized: bool = False, num_threads: int | None = None
) -> Ops:
    """The backend for ``device``, computing in ``dtype``.

    Args:
        kernels: on the CPU, the instruction set of the native kernels, ``"torch"`` for none of them, or ``"auto"``
            for the best there are.
        quantized: weights will be quantised; if not, bfloat16 products are oneDNN's where the processor has them.
        num_threads: on the CPU; None takes torch's.

    Raises:
        ValueError: there is no backend for the device, the dtype or the kernels.
    """
    if device == "cpu":
        chosen = native_kernels() if kernels == "auto" else kernels
        if chosen is None or chosen == "torch":
            from foreword.ops.cpu import CpuOps

            return CpuOps(dtype, num_threads)
        from foreword.ops.cpu.native import NativeOps

        fast = str(dtype) == "torch.bfloat16" and _has_fast_bfloat16()
        return NativeOps(dtype, chosen, num_threads, onednn=fast and not quantized)
    if device.partition(":")[0] == "cuda":
        raise ValueError(f"device={device!r} is not supported yet: the Triton backend is still to come; use 'cpu'")
    raise ValueError(f"device={device!r} is not supported: use 'cpu'")


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
