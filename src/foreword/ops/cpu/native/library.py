"""The native kernels through ctypes: the structs of foreword.h, and the functions with their types."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

logger = logging.getLogger("foreword")

VERSION = 5
"""Of the interface: FW_VERSION."""

MODULE = "foreword.ops.cpu.native._kernels"

F32, BF16, Q8, Q4 = range(4)
"""How a weight is stored."""

GROUP = 32
"""Inputs that share a scale in quantised weights and activations."""

SLOTS = 16
"""Token slots that lie side by side in the KV pool."""


class Linear(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32), ("n", c_int32), ("k", c_int32), ("panels", c_void_p), ("bias", c_void_p),
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
        ("num_tasks", c_int32), ("num_splits", c_int32), ("num_parts", c_int32), ("num_tokens", c_int32),
        ("rows", c_void_p), ("positions", c_void_p), ("segments", c_void_p), ("tasks", c_void_p), ("splits", c_void_p),
        ("blocks", c_void_p),
    )  # fmt: skip


class KV(ctypes.Structure):
    _fields_ = (("key", c_void_p), ("value", c_void_p), ("head_stride", c_int64))


class Batch(ctypes.Structure):
    _fields_ = (
        ("attention", POINTER(Attention)), ("slots", c_void_p), ("kv", POINTER(KV)), ("hidden", c_void_p),
        ("outputs", c_void_p), ("num_outputs", c_int32),
    )  # fmt: skip


_SIGNATURES = {
    "fw_abi": (c_int32,),
    "fw_kernels_available": (None, c_char_p, c_int32),
    "fw_create": (c_void_p, c_char_p, c_int32),
    "fw_destroy": (None, c_void_p),
    "fw_forward": (c_int, c_void_p, POINTER(Model), POINTER(Batch)),
    "fw_apply": (c_int, c_void_p, POINTER(Linear), c_void_p, c_int32, c_void_p),
    "fw_attend": (
        c_int, c_void_p, POINTER(Model), POINTER(Layer), POINTER(Attention), POINTER(KV), c_void_p, c_int64, c_void_p,
    ),
    "fw_store_kv": (None, POINTER(Model), POINTER(KV), c_void_p, c_int32, c_void_p, c_void_p, c_int64),
    "fw_copy_slots": (None, POINTER(Model), POINTER(KV), c_int32, c_int32, c_int32, c_int32),
    "fw_argmax": (None, c_void_p, c_void_p, c_int32, c_int64, c_void_p),
    "fw_packed_bytes": (c_int64, c_int32, c_int32, c_int32),
    "fw_pack": (None, c_int32, c_void_p, c_int32, c_int32, c_void_p),
}  # fmt: skip


def expected_abi() -> int:
    """What ``fw_abi`` returns when the library was built from the interface that this module mirrors."""
    sizes = {Model: 1, Layer: 7, Batch: 31, Attention: 127, KV: 511}
    return VERSION << 16 ^ sum(factor * ctypes.sizeof(struct) for struct, factor in sizes.items())


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; None when the package was built without a C compiler, or they cannot be used: a damaged file, or one
    built from other sources than these."""
    try:
        spec = importlib.util.find_spec(MODULE)
        if spec is None or spec.origin is None:
            return None
        loaded = ctypes.CDLL(spec.origin)
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        if loaded.fw_abi() != expected_abi():
            raise OSError("it was built from other sources")
    except (ImportError, OSError, AttributeError) as error:
        logger.warning("the native CPU kernels cannot be used (%s): install the package again", error)
        return None
    return loaded


@cache
def available() -> tuple[str, ...]:
    """Names of the instruction sets this processor runs, the best first; empty without the library."""
    loaded, names = library(), ctypes.create_string_buffer(256)
    if loaded is None:
        return ()
    loaded.fw_kernels_available(names, len(names))
    return tuple(names.value.decode().split())


class Kernels:
    """A pool of threads and its buffers, for one instruction set; freed when nothing refers to it any more.

    Raises:
        ValueError: the instruction set is not available.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self.context: int | None = None
        self._process = os.getpid()
        loaded = library()
        if loaded is not None:
            self.library = loaded
            self.context = loaded.fw_create(name.encode(), num_threads)
        if not self.context:
            there = ", ".join(("auto", "torch", *available()))
            raise ValueError(
                f"kernels={name!r} are not there on this processor or in this installation: choose {there}"
            )

    def __del__(self) -> None:
        if self.context and self._process == os.getpid():  # a forked child has none of its threads
            self.library.fw_destroy(self.context)
