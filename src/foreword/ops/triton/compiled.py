"""Every kernel compiled ahead of time, without a GPU: its registers, what it spills, and its shared memory.

``python -m foreword.ops.triton.compiled [--all] [ARCH ..]`` prints a line for each configuration and device, and ends
with status 1 if one of them runs out of registers or needs more shared memory than the device has. Without ``--all`` it
takes a few of each kind. Triton keeps what it has compiled. ``ARCH``: 80, 90, 100; all if none is given.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foreword.ops.kv_int8 import SCALE_BYTES
from foreword.ops.triton import attention, copy, kv_write
from foreword.ops.triton.attention import attention_options, merge_options, tile_heights
from foreword.ops.triton.cases import ELEMENTS, Case, all_layer_cases, some_layer_cases
from foreword.ops.triton.kv_write import KVFormat
from foreword.ops.triton.numeric import INTERPRETED
from foreword.ops.triton.planner import SPLIT

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program may have, by device."""
_LEAST_REGISTERS = 8
"""A kernel with fewer has lost its body on the way."""
_MOST_REGISTERS = 255
_TRADED = 8
"""Bytes that the assembler may spill while there are registers left: for one more program to a multiprocessor."""


class Usage(NamedTuple):
    """What a compiled kernel needs: registers of a thread, bytes that a thread spills, shared memory of a program."""

    registers: int
    spilled: int
    shared: int

    def problems(self, arch: int) -> list[str]:
        """Why it should not be launched."""
        found = []
        if self.registers < _LEAST_REGISTERS:
            found.append(f"{self.registers} registers: there is no kernel")
        if self.spilled > (_TRADED if self.registers < _MOST_REGISTERS else 0):
            found.append(f"spills {self.spilled} bytes")
        if self.shared > SHARED_MEMORY[arch]:
            found.append(f"needs {self.shared} bytes of shared memory of {SHARED_MEMORY[arch]}")
        return found


def attention_case(
    arch: int,
    dtype: torch.dtype,
    form: str,
    head_dim: int,
    rows: int,
    *,
    split: int = 0,
    group: int = 4,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
) -> Case:
    """A launch of :func:`foreword.ops.triton.attention.attention_kernel`."""
    layout = KVFormat(form, head_dim + (SCALE_BYTES if form == "int8" else 0))
    options = attention_options(dtype, layout, head_dim, rows, split=split, native_fp8=arch >= 89)
    warps, stages, fusion = (options.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion"))
    pool, factors = _pool_types(dtype, form)
    types = dict.fromkeys(("items", "rows", "table"), "*i32")
    types |= dict.fromkeys(("part_values", "part_stats", "slopes"), "*fp32")
    types |= dict.fromkeys(("query", "output"), "*" + ELEMENTS[dtype])
    types |= {"key": pool, "value": pool, "key_scales": factors, "value_scales": factors}
    types |= {"query_stride": "i32", "pool_stride": "i32", "window": "i32", "scale": "fp32", "softcap": "fp32"}
    flags = {"WINDOW": window, "SOFTCAP": softcap, "ALIBI": alibi}
    constants = {"NUM_HEADS": 8 * group, "GROUP": group, "PAGE": 16, **flags, **options}
    extras = "".join(f" {name.lower()}" for name, on in flags.items() if on)
    name = f"attention {ELEMENTS[dtype]} {form} {head_dim} x{group} rows {rows}{' split' if split else ''}{extras}"
    return Case(name, attention.attention_kernel, types, constants, warps, stages, fusion)


def merge_case(dtype: torch.dtype, head_dim: int) -> Case:
    """A launch of :func:`foreword.ops.triton.attention.merge_kernel`."""
    options = merge_options(32, head_dim)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    types = {"output": "*" + ELEMENTS[dtype], "part_values": "*fp32", "part_stats": "*fp32"}
    types |= {"merges": "*i32", "part_list": "*i32"}
    return Case(f"merge {ELEMENTS[dtype]} {head_dim}", attention.merge_kernel, types, options, warps, stages)


def kv_write_case(dtype: torch.dtype, form: str, head_dim: int, rotated: int) -> Case:
    """A launch of :func:`foreword.ops.triton.kv_write.kv_write_kernel`."""
    layout = KVFormat(form, head_dim + (SCALE_BYTES if form == "int8" else 0))
    pool, factors = _pool_types(dtype, form)
    types = dict.fromkeys(("query", "key", "value"), "*" + ELEMENTS[dtype])
    types |= {"key_pool": pool, "value_pool": pool, "key_scales": factors, "value_scales": factors}
    types |= {"slots": "*i32", "positions": "*i32", "cos": "*fp32", "sin": "*fp32", "num_tokens": "i32"}
    types |= dict.fromkeys(("num_stored", "query_stride", "key_stride", "value_stride", "pool_stride"), "i32")
    constants = kv_write.constants(32 if rotated else 0, 8, head_dim, rotated, layout, positions=rotated > 0)
    name = f"kv_write {ELEMENTS[dtype]} {form} {head_dim} rotated {rotated}"
    return Case(name, kv_write.kv_write_kernel, types, constants, kv_write.NUM_WARPS, 1)


def copy_case(words: int) -> Case:
    """A launch of :func:`foreword.ops.triton.copy.copy_kernel`."""
    types = {"source": "*i32", "target": "*i32", "copies": "*i32", "source_stride": "i32", "target_stride": "i32"}
    constants = {"WORDS": words, "BLOCK": copy.BLOCK}
    return Case(f"copy of {words} words", copy.copy_kernel, types, constants, copy.NUM_WARPS, 1)


def _pool_types(dtype: torch.dtype, form: str) -> tuple[str, str]:
    """Of the pool's pointer and of that of its scales."""
    plain = "*" + ELEMENTS[dtype]
    return {"plain": (plain, plain), "int8": ("*i8", "*fp32"), "fp8": ("*u8", "*u8")}[form]


def some_cases(arch: int) -> Iterator[Case]:
    """A few that cover all kernels, formats and flags."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield attention_case(arch, bf16, "plain", 128, 16)
    yield attention_case(arch, bf16, "plain", 128, 64, split=SPLIT, group=7)
    yield attention_case(arch, fp16, "plain", 80, 128, alibi=True)
    yield attention_case(arch, bf16, "plain", 256, 64, window=True, softcap=True)
    yield attention_case(arch, bf16, "int8", 128, 16)
    yield attention_case(arch, bf16, "fp8", 128, 64)
    yield attention_case(arch, fp32, "plain", 64, 16, split=SPLIT)
    yield merge_case(bf16, 128)
    yield kv_write_case(bf16, "plain", 128, 128)
    yield kv_write_case(bf16, "int8", 80, 32)
    yield kv_write_case(fp16, "fp8", 96, 0)
    yield copy_case(64)
    yield from some_layer_cases(arch)


def all_cases(arch: int) -> Iterator[Case]:
    """All that the backend would launch for usual models."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield from some_cases(arch)
    for form in ("plain", "int8", "fp8"):
        for head_dim in (64, 80, 96, 128, 256) if form == "plain" else (64, 128, 256):
            for rows in tile_heights(bf16, head_dim, deterministic=False):
                yield attention_case(arch, bf16, form, head_dim, rows)
                if form == "plain":
                    yield attention_case(arch, bf16, form, head_dim, rows, window=True, softcap=True)
            for rows in tile_heights(bf16, head_dim, deterministic=True):
                yield attention_case(arch, bf16, form, head_dim, rows, split=SPLIT)
                yield attention_case(arch, bf16, form, head_dim, rows, split=SPLIT, window=True, softcap=True)
    for head_dim in (64, 128):
        yield attention_case(arch, fp16, "plain", head_dim, 64, split=SPLIT, alibi=True)
        yield attention_case(arch, fp32, "plain", head_dim, 16)
        yield attention_case(arch, fp32, "plain", head_dim, 16, split=SPLIT, window=True)
    for head_dim in (64, 80, 96, 128, 256):
        yield merge_case(bf16, head_dim)
        for form in ("plain", "int8", "fp8"):
            yield kv_write_case(bf16, form, head_dim, head_dim)
            yield kv_write_case(bf16, form, head_dim, 0)
    yield from all_layer_cases(arch)


def compile_case(case: Case, arch: int) -> Usage:
    """Compile for a device and measure."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": case.fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _usage(compiled.asm["cubin"], compiled.metadata.shared)


def _usage(cubin: bytes, shared: int) -> Usage:
    """Read from the binary; a thread's stack holds what it spills, as the kernels have nothing else there."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{tool} told nothing of registers: {text!r}")
    return Usage(int(found[1]), int(found[2]), shared)


def main(arguments: list[str]) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m foreword.ops.triton.compiled", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all configurations, some minutes for each device")
    parser.add_argument("arch", nargs="*", type=int, help="compute capabilities, 80, 90 or 100")
    chosen = parser.parse_args(arguments)
    archs = chosen.arch or list(SHARED_MEMORY)
    if unknown := set(archs) - set(SHARED_MEMORY):
        parser.error(f"arch {sorted(unknown)}: give some of {list(SHARED_MEMORY)}")
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set; nothing can be compiled with it")
    failed = 0
    print(f"{'configuration':60} {'device':>6} {'warps':>5} {'registers':>9} {'spilled':>7} {'shared KiB':>10}")
    for arch in archs:
        cases = {case.name: case for case in (all_cases(arch) if chosen.all else some_cases(arch))}
        for case in cases.values():
            usage = compile_case(case, arch)
            problems = usage.problems(arch)
            failed += bool(problems)
            numbers = f"{case.num_warps:5} {usage.registers:9} {usage.spilled:7} {usage.shared / 1024:10.1f}"
            print(f"{case.name:60} sm_{arch:<3} {numbers}", "; ".join(problems), flush=True)
    print(f"{failed} of them must not be launched" if failed else "all of them can be launched")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
