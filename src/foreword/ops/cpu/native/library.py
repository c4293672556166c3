"""The native kernels through ctypes: the structs of foreword.h, and the functions with their types."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

MODULE = "foreword.ops.cpu.native._kernels"

F32, BF16, Q8, Q4 = range(4)
"""How a weight is stored."""

GROUP = 32
"""Inputs that share a scale in quantised weights and activations."""

SLOTS = 16
"""Token slots that lie side by side in the KV pool."""


class Linear(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32), ("n", c_int32), ("k", c_int32), ("reserved", c_int32),
        ("panels", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Linear), ("output", Linear), ("gate_up", Linear), ("down", Linear),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p),
        ("attention_post_norm", c_void_p), ("mlp_post_norm", c_void_p),
        ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p),
        ("softcap", c_float), ("window", c_int32),
    )  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", c_int32), ("hidden", c_int32), ("inner", c_int32),
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32),
        ("gelu", c_int32), ("kv_kind", c_int32), ("eps", c_float), ("scale", c_float),
        ("layers", POINTER(Layer)), ("final_norm", c_void_p),
    )  # fmt: skip


class Attention(ctypes.Structure):
    _fields_ = (
        ("num_tasks", c_int32), ("num_tokens", c_int32), ("rows", c_void_p), ("positions", c_void_p),
        ("segments", c_void_p), ("tasks", c_void_p), ("blocks", c_void_p),
    )  # fmt: skip


class KV(ctypes.Structure):
    _fields_ = (("key", c_void_p), ("value", c_void_p), ("head_stride", c_int64))


class Batch(ctypes.Structure):
    _fields_ = (
        ("attention", POINTER(Attention)), ("slots", c_void_p), ("kv", POINTER(KV)), ("hidden", c_void_p),
    )  # fmt: skip


_SIGNATURES = {
    "fw_kernels_available": (c_char_p,),
    "fw_create": (c_void_p, c_char_p, c_int32),
    "fw_destroy": (None, c_void_p),
    "fw_forward": (c_int, c_void_p, POINTER(Model), POINTER(Batch)),
    "fw_apply": (c_int, c_void_p, POINTER(Linear), c_void_p, c_int32, c_void_p),
    "fw_attend": (
        c_int, c_void_p, POINTER(Model), POINTER(Layer), POINTER(Attention), POINTER(KV), c_void_p, c_int64, c_void_p,
    ),
    "fw_store_kv": (
        None, c_void_p, POINTER(Model), POINTER(KV), c_void_p, c_int32, c_void_p, c_void_p, c_int64,
    ),
    "fw_copy_slots": (None, POINTER(Model), POINTER(KV), c_int32, c_int32, c_int32, c_int32),
    "fw_argmax": (None, c_void_p, c_void_p, c_int32, c_int64, c_void_p),
    "fw_packed_bytes": (c_int64, c_int32, c_int32, c_int32),
    "fw_pack": (None, c_int32, c_void_p, c_int32, c_int32, c_void_p),
}  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None when the package was built without a C compiler."""
    try:
        spec = importlib.util.find_spec(MODULE)
        if spec is None or spec.origin is None:
            return None
        loaded = ctypes.CDLL(spec.origin)
    except (ImportError, OSError):
        return None
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def available() -> tuple[str, ...]:
    """Names of the instruction sets this processor runs, the best first; empty without the library."""
    loaded = library()
    return tuple(loaded.fw_kernels_available().decode().split()) if loaded else ()


class Kernels:
    """A pool of threads and its buffers, for one instruction set; freed when nothing refers to it any more.

    Raises:
        ValueError: the instruction set is not available.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self.context: int | None = None
        loaded = library()
        if loaded is not None:
            self.library = loaded
            self.context = loaded.fw_create(name.encode(), num_threads)
        if not self.context:
            raise ValueError(f"kernels={name!r} are not available; available are: {', '.join(available()) or 'none'}")

    def __del__(self) -> None:
        if self.context:
            self.library.fw_destroy(self.context)
