"""Which kernels an engine computes with, and what it does without any."""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from foreword import Engine, EngineConfig
from foreword.engine import build
from foreword.ops import create_ops, default_dtype
from foreword.ops.cpu import CpuOps
from foreword.ops.cpu.native import library as lib
from support import assert_same_bits, cold, generate_recorded, native_kernels, random_ids

NewEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
PROMPTS = [random_ids(seed, length) for seed, length in enumerate((3, 40, 130))]


def ops_of(engine: Engine) -> CpuOps:
    ops = engine._loop.core.runner.ops
    assert isinstance(ops, CpuOps)
    return ops


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a package that was built without a C compiler."""
    monkeypatch.setattr(lib, "library", lambda: None)
    monkeypatch.setattr(lib, "available", lambda: ())
    build._say_native_kernels_are_missing.cache_clear()


def test_these_kernels_were_built() -> None:
    """Said where it shows in the summary: without them the tests of the native kernels are skipped."""
    if not lib.available():
        pytest.skip("the package was built without a C compiler: its native kernels are not tested")
    assert lib.available()[-1] == "portable"
    assert set(lib.available()) <= {"avx512_vnni", "avx512", "avx2", "portable"}


@pytest.mark.usefixtures("without_library")
def test_without_the_library_the_engine_says_so_once_and_answers(
    new_tiny: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """One line at info level, none above; the answers are those of the torch kernels."""
    with caplog.at_level(logging.INFO, logger="foreword"):
        engine = new_tiny()
        new_tiny()
    said = [record for record in caplog.records if "C compiler" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"]
    assert "using torch" in said[0].getMessage()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert ops_of(engine).name == "torch"
    expected = generate_recorded(new_tiny(kernels="torch"), PROMPTS, **GREEDY)
    assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_without_the_library_quantised_weights_work_too(new_tiny: NewEngine, scheme: str) -> None:
    outputs = new_tiny(quantization=scheme).generate(PROMPTS, **GREEDY)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5] * 3


@pytest.mark.usefixtures("without_library")
def test_without_the_library_the_default_is_not_quantised(new_tiny: NewEngine) -> None:
    """``auto`` means what the kernels are fast at."""
    engine = new_tiny(dtype="auto")
    assert ops_of(engine).dtype == default_dtype("cpu", "torch")
    expected = generate_recorded(new_tiny(dtype="auto", quantization=None), PROMPTS, **GREEDY)
    assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("kernels", ["portable", "avx2"])
def test_without_the_library_native_kernels_are_refused_by_name(new_tiny: NewEngine, kernels: str) -> None:
    with pytest.raises(ValueError, match=rf"kernels='{kernels}'.*choose auto, torch$"):
        new_tiny(kernels=kernels)


def test_a_library_that_cannot_be_loaded_is_as_good_as_none() -> None:
    """A damaged file, or one of another platform: no error, torch instead."""
    code = (
        "import ctypes, torch\n"
        "def broken(*_): raise OSError('invalid ELF header')\n"
        "ctypes.CDLL = broken\n"
        "from foreword.ops import create_ops, native_kernels\n"
        "print(native_kernels(), create_ops('cpu', torch.float32).name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "torch"]


@pytest.mark.skipif(not lib.available(), reason="there is no library to be wrong")
def test_a_library_of_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An interface that differs would be called with the wrong arguments."""
    loaded = lib.library()
    assert loaded is not None
    assert loaded.fw_abi() == lib.expected_abi()
    monkeypatch.setattr(lib, "VERSION", lib.VERSION + 1)
    assert lib.library.__wrapped__() is None
    assert "built from other sources" in caplog.text


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernels", ["torch", *native_kernels()[:1]])
def test_threads_are_those_asked_for(new_tiny: NewEngine, kernels: str, threads: int) -> None:
    """They change no bit, nor torch's number in the caller's thread and in new ones."""
    before = torch.get_num_threads()
    engine = new_tiny(kernels=kernels, num_threads=threads)
    assert engine.backend.endswith(f", {threads} threads")
    inside = engine._loop.call(torch.get_num_threads)
    assert inside == (threads if kernels == "torch" else 1)
    expected = generate_recorded(new_tiny(kernels=kernels), PROMPTS, **GREEDY)
    assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
    with ThreadPoolExecutor(1) as pool:
        assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (before, before)


@pytest.mark.parametrize("kernels", native_kernels()[:1])
def test_onednn_products_beside_native_attention_are_exact(
    new_tiny: NewEngine, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """As on processors that multiply bfloat16: cold and warm, in one piece and in chunks."""
    monkeypatch.setattr("foreword.ops._has_fast_bfloat16", lambda: True)
    options: dict[str, Any] = {"kernels": kernels, "dtype": "bfloat16", "quantization": None}
    whole, chunked = (new_tiny(**options, max_num_batched_tokens=budget) for budget in (512, 7))
    assert "oneDNN" in ops_of(whole).kv_layout
    expected = cold(whole, PROMPTS, **GREEDY)
    for engine in (whole, chunked):
        assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
        assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)


@pytest.mark.parametrize("kernels", ["torch", *native_kernels()])
def test_the_kernels_asked_for_are_used(kernels: str, new_tiny: NewEngine) -> None:
    assert ops_of(new_tiny(kernels=kernels)).name == kernels


def test_the_best_kernels_are_the_default(new_tiny: NewEngine) -> None:
    best = lib.available()[0] if lib.available() else "torch"
    assert ops_of(new_tiny()).name == best
    assert create_ops("cpu", torch.float32).name == best


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names kernels of another processor")
def test_kernels_this_processor_lacks_are_refused(new_tiny: NewEngine) -> None:
    for kernels in {"avx2", "avx512", "avx512_vnni"} - set(lib.available()):
        with pytest.raises(ValueError, match=f"kernels='{kernels}' are not there.*choose auto, torch"):
            new_tiny(kernels=kernels)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_blocks_smaller_than_a_group_of_slots_fall_back_to_torch(
    new_tiny: NewEngine, caplog: pytest.LogCaptureFixture, block_size: int
) -> None:
    """Said at info level; the bits are those of torch. Native kernels asked for by name are refused."""
    blocks = 4096 // block_size
    with caplog.at_level(logging.INFO, logger="foreword"):
        engine = new_tiny(block_size=block_size, blocks=blocks)
    assert ops_of(engine).name == "torch"
    if lib.available():
        assert "block_size to be a multiple of 16" in caplog.text
        with pytest.raises(ValueError, match=r"kernels='portable'.*block_size.*multiple of 16"):
            new_tiny(block_size=block_size, blocks=blocks, kernels="portable")
    expected = generate_recorded(new_tiny(kernels="torch"), PROMPTS, **GREEDY)
    assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)


@pytest.mark.parametrize(("field", "value"), [("kernels", "sse2"), ("quantization", "int2"), ("kernels", None)])
def test_unknown_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        EngineConfig.build("x", **{field: value})


@pytest.mark.parametrize("kernels", native_kernels())
def test_kv_of_other_kernels_or_weights_is_never_read(kernels: str, new_tiny: NewEngine) -> None:
    """Each way to compute has a namespace of its own, for its KV has other bits or another layout."""
    ways: list[dict[str, Any]] = [
        {"kernels": "torch"},
        {"kernels": kernels},
        {"kernels": kernels, "quantization": "int8"},
        {"kernels": kernels, "quantization": "int4"},
        {"kernels": kernels, "quantization": "int8", "dtype": "bfloat16"},
    ]
    engines = [new_tiny(**way) for way in ways]
    assert len({engine._client._namespace_key("") for engine in engines}) == len(ways)
    assert engines[1]._client._namespace_key("") == new_tiny(**ways[1])._client._namespace_key("")
