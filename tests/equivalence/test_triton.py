"""Triton's kernels under whole engines: the results of the CPU's kernels, and the same bits however they came to be.

With ``deterministic=True`` and in float32; without a GPU under Triton's interpreter; see ``triton_engine.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword import Engine
from foreword.ops.cpu import CpuOps
from foreword.ops.protocol import KVLayer
from quantized_checkpoints import save_quantized
from support import assert_same_bits, cold, tiny_options

from .triton_engine import CHECKPOINT, FORKED, GREEDY, LONG, PROMPTS, STORAGE, SWAPPED, Rows

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is there on Linux only")
PROGRAM = Path(__file__).with_name("triton_engine.py")
CLOSE = {"float32": 2e-5, "int8 and fp8 KV": 0.05, "int4 and int8 KV": 0.05}
"""Of logits that reach 5. KV in 8 bits: a value that is rounded the other way."""


def run(model: Path, target: Path, *arguments: str) -> dict[str, Rows]:
    command = [sys.executable, str(PROGRAM), str(model), str(target), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Rows] = torch.load(target)
    return results


@pytest.fixture(scope="module")
def results(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """By name of the case: for each prompt the tokens and the logits behind them."""
    return run(tiny_dir, tmp_path_factory.mktemp("triton") / "results.pt")


class RoundingOps(CpuOps):
    """The CPU's operations, with KV that has the values of fp8."""

    def store_kv(self, key: torch.Tensor, value: torch.Tensor, layer: KVLayer, slots: torch.Tensor) -> None:
        key, value = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        super().store_kv(key, value, layer, slots)


def on_the_cpu(model: Path, prompts: list[list[int]], storage: dict[str, Any]) -> Rows:
    """The same storage of weights and KV with torch's operations."""
    options = {"quantization": None, "kernels": "torch", "device": "cpu", **storage}
    with pytest.MonkeyPatch.context() as patch:
        if options.get("kv_cache_dtype") == "fp8":
            del options["kv_cache_dtype"]
            patch.setattr("foreword.ops.cpu.CpuOps", RoundingOps)
        with Engine(str(model), **tiny_options(**options)) as engine:
            return cold(engine, prompts, **GREEDY)


def assert_close(rows: Rows, expected: Rows, bound: float) -> None:
    for (ids, logits), (wanted_ids, wanted) in zip(rows, expected, strict=True):
        assert ids == wanted_ids
        assert (logits.cpu() - wanted).abs().max() <= bound


def test_results_are_those_of_the_cpu(results: dict[str, Rows], tiny: Callable[..., Engine]) -> None:
    """The same greedy tokens, and logits that differ by the rounding of float32."""
    expected = cold(tiny(kernels="torch", device="cpu"), [*PROMPTS, FORKED], **GREEDY)
    assert_close(results["alone"], expected, CLOSE["float32"])


@pytest.mark.parametrize("storage", STORAGE)
def test_results_of_fewer_bits(results: dict[str, Rows], tiny_dir: Path, storage: str) -> None:
    """Quantised weights and KV mean the same."""
    assert_close(results[storage], on_the_cpu(tiny_dir, PROMPTS[:2], STORAGE[storage]), CLOSE[storage])


def test_fp8_is_near_plain_kv(results: dict[str, Rows], tiny_dir: Path) -> None:
    """Four significant bits move the logits, which reach 4, by a tenth of that at most."""
    plain = on_the_cpu(tiny_dir, PROMPTS[:2], {"quantization": "int8"})
    errors = [(rows.cpu() - wanted).abs().max() for (_, rows), (_, wanted) in zip(results[SWAPPED], plain, strict=True)]
    assert CLOSE[SWAPPED] < max(errors) < 0.5


def test_the_same_bits_from_the_host_tier(results: dict[str, Rows]) -> None:
    """Of the first token, whose prompt was computed or came back from a second storage."""
    ids, logits = results[SWAPPED][1]
    assert_same_bits(results["swapped"], [(ids[:1], logits[:1])])


def test_results_of_a_quantized_checkpoint(results: dict[str, Rows], tiny_dir: Path, tmp_path: Path) -> None:
    """Multiplied as they are, its numbers stand for the same."""
    stored = save_quantized(tiny_dir, tmp_path, CHECKPOINT) / "stored"
    with Engine(str(stored), **tiny_options(kernels="torch", quantization="int4", device="cpu")) as engine:
        assert_close(results[CHECKPOINT], cold(engine, PROMPTS[:2], **GREEDY), CLOSE["float32"])


@pytest.mark.parametrize("way", ["batched", "cached", "chunked"])
def test_the_same_bits(results: dict[str, Rows], way: str) -> None:
    """All prompts in one batch, from the cache, and in chunks: as each alone."""
    assert_same_bits(results[way], results["alone"][: len(PROMPTS)])


def test_the_same_bits_after_a_copy_on_write(results: dict[str, Rows]) -> None:
    assert_same_bits(results["forked"], results["alone"][len(PROMPTS) :])


def test_the_same_bits_after_a_preemption(results: dict[str, Rows]) -> None:
    assert_same_bits(results["preempted"], results["undisturbed"])


@pytest.mark.soak
def test_longer_prompts(tiny_dir: Path, tmp_path: Path) -> None:
    """Over two tiles, with each storage, in every way."""
    found = run(tiny_dir, tmp_path / "results.pt", "soak")
    for name in ("float32", *STORAGE):
        assert_close(found[name], on_the_cpu(tiny_dir, LONG, STORAGE.get(name, {})), CLOSE[name])
        for way in ("batched", "cached", "chunked"):
            assert_same_bits(found[f"{name}, {way}"], found[name])
