"""The backend as a whole: what is chosen by device, its plans and counters, its products."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foreword.ops import choose_device, create_ops, default_dtype, grouped
from foreword.ops.protocol import AttentionSpec, Draw, SlotCopy
from foreword.ops.quantize import dequantize, quantize
from foreword.ops.triton import matmul, selfcheck
from foreword.ops.triton.backend import TritonOps
from foreword.ops.triton.numeric import INTERPRETED
from quantized_checkpoints import gptq_tensors, round_to_four_bits

from .pages import DEVICE, Pages


def ops(dtype: torch.dtype = torch.float32, **options: Any) -> TritonOps:
    made = create_ops(DEVICE, dtype, "triton", **options)
    assert isinstance(made, TritonOps)
    made.enter_thread()
    return made


def test_what_kv_depends_on() -> None:
    """The layout names what computed it, and whether its bits depend on the batch."""
    layouts = [ops(deterministic=on).kv_layout for on in (False, True)]
    assert all("triton" in layout for layout in layouts)
    assert ["deterministic" in layout for layout in layouts] == [False, True]


def test_one_plan_for_each_window() -> None:
    """Made when a layer first asks for it, and counted then."""
    backend = ops()
    pages = Pages([300, 140])
    parts = [(0, 299, 300), (1, 100, 140)]
    plan = backend.plan_attention(pages.sequences(parts))
    assert (plan.by_window, backend.tiles_used) == ({}, 0)
    query = torch.cat([pages.queries[number][begin:end] for number, begin, end in parts]).to(DEVICE)
    specs = [AttentionSpec(0.125), AttentionSpec(0.125, window=64), AttentionSpec(0.125, softcap=4.0)]
    for spec in specs:
        result = backend.attention(query, pages.layer, plan, spec).cpu()
        assert (result.double() - pages.expected(parts, spec)).abs().max() < 3e-6
    assert set(plan.by_window) == {None, 64}
    assert backend.tiles_used == sum(each.tiles_used for each in plan.by_window.values()) > 0
    assert backend.tiles_read == sum(each.tiles_read for each in plan.by_window.values()) > 0


def test_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain weights by torch's product, deterministic ones by Triton's; quantised weights always by Triton's."""
    calls = []
    original = matmul.multiply
    monkeypatch.setattr(
        "foreword.ops.triton.backend.multiply", lambda *args, **kw: calls.append(kw) or original(*args, **kw)
    )
    weight, bias, x = torch.randn(24, 64), torch.randn(24), torch.randn(3, 64)
    for given, expected in ((weight, weight), (quantized := quantize(weight, "int8"), dequantize(quantized))):
        for deterministic in (False, True):
            calls.clear()
            source = given.to(DEVICE) if isinstance(given, torch.Tensor) else given
            product = ops(deterministic=deterministic).linear(source, bias.to(DEVICE))
            assert torch.allclose(product(x.to(DEVICE)).cpu(), F.linear(x, expected, bias), atol=1e-4)
            by_triton = deterministic or given is quantized
            assert calls == ([{"deterministic": deterministic}] if by_triton else [])


def test_products_of_checkpoints() -> None:
    """Four bits with their inputs in any order, and 8-bit floats, also in blocks, for which there is no kernel."""
    x, bias = torch.randn(3, 64), torch.randn(24)
    four_bits = round_to_four_bits(torch.randn(24, 64), 32, shuffled=True, least_zero=1)
    numbers = torch.randn(24, 64).to(torch.float8_e4m3fn)
    for weight in (
        grouped.gptq(*(tensor.to(DEVICE) for tensor in gptq_tensors(four_bits).values())),
        *(grouped.fp8(numbers.to(DEVICE), torch.rand(groups, 24, device=DEVICE)) for groups in (1, 2)),
    ):
        found = ops().linear(weight, bias.to(DEVICE))(x.to(DEVICE)).cpu()
        assert torch.allclose(found, F.linear(x, dequantize(weight).cpu(), bias), atol=1e-4)


def test_rows_and_tokens() -> None:
    """No padding; tokens come to the host as the protocol says; rotation leaves its argument alone."""
    backend = ops()
    assert [backend.pad_rows(rows) for rows in (0, 1, 17)] == [0, 1, 17]
    logits = torch.tensor([[1.0, 5.0, 5.0], [torch.nan, 1.0, 2.0], [0.0, torch.inf, 1.0]], device=DEVICE)
    assert backend.draw(logits, [Draw(), Draw(), Draw(1.0)]).tolist() == [1, -1, -1]
    x, angle = torch.randn(3, 2, 64, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    before = x.clone()
    turned = backend.rotate(x[:, 1:], angle.cos(), angle.sin())
    assert torch.equal(x, before)
    assert torch.allclose(turned.norm(dim=-1), x[:, 1:].norm(dim=-1), rtol=1e-5)
    pool = torch.arange(64.0, device=DEVICE).view(1, 2, 1, 8, 4)
    expected = pool.clone()
    expected[..., 6:8, :] = expected[..., 1:3, :]
    backend.copy_slots(pool, [SlotCopy(1, 6, 2)])
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("device", "number"), [("cuda", 3), ("cuda:1", 1)])
def test_one_device_for_all_threads(monkeypatch: pytest.MonkeyPatch, device: str, number: int) -> None:
    """That of the thread that made the backend, where none is named."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=2, name="")
    )
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    TritonOps(torch.bfloat16, device).enter_thread()
    assert entered == [torch.device("cuda", number)]


# -- the choice of a device ------------------------------------------------------------------------------------


def test_what_device_auto_means(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU only if there is one, with Triton, whose kernels are not ruled out and compute what they should."""
    found = importlib.util.find_spec
    for gpu, triton, kernels, fault, expected in (
        (True, True, "auto", None, "cuda"), (True, True, "triton", None, "cuda"), (True, True, "torch", None, "cpu"),
        (True, True, "avx2", None, "cpu"), (True, False, "auto", None, "cpu"), (False, True, "auto", None, "cpu"),
        (True, True, "auto", "norms: off by 7", "cpu"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(selfcheck, "find_fault", lambda *_, fault=fault: fault)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, triton=triton: found(name) if triton or name != "triton" else None
        )
        assert choose_device("auto", kernels, tmp_path) == expected
        assert [choose_device(device, kernels, tmp_path) for device in ("cpu", "cuda:1")] == ["cpu", "cuda:1"]


def test_a_gpu_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    """With what is wrong, and how to take it all the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(selfcheck, "find_fault", lambda *_: "norms: off by 7")
    with caplog.at_level("WARNING", "foreword"):
        assert choose_device("auto", "auto", tmp_path) == "cpu"
    assert "for the GPU do not pass their check: norms: off by 7; device='cuda' takes" in caplog.text


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the way out: no GPU, one of a number that is not there, CPU kernels, no Triton, another dtype."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match=r"device='cuda' is not there: torch \S+ has no CUDA in it; install a CUDA"):
        create_ops("cuda", torch.bfloat16)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="finds no NVIDIA GPU, or no driver for it; see what nvidia-smi"):
        create_ops("cuda", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device='cuda:2' is not there: there are 2, the first is 'cuda:0'"):
        create_ops("cuda:2", torch.bfloat16)
    for device in ("cuda:-1", "cuda:x", "cuda:"):
        with pytest.raises(ValueError, match=f"device='{device}' names no GPU: give 'cuda', or 'cuda:0'"):
            create_ops(device, torch.bfloat16)
    with pytest.raises(ValueError, match="device='cpu:0' is not supported: use 'auto', 'cpu' or 'cuda'"):
        create_ops("cpu:0", torch.bfloat16, "triton")
    with pytest.raises(ValueError, match="kernels='avx2' are for the CPU"):
        create_ops("cuda", torch.bfloat16, "avx2")
    with pytest.raises(ValueError, match=r"float32, float16 or bfloat16, not in torch\.float64"):
        TritonOps(torch.float64, "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"package triton, which is not installed; .* 'foreword\[gpu\]'"):
        create_ops("cuda", torch.bfloat16)


def test_on_the_cpu_without_the_interpreter() -> None:
    """In a process of its own: what to set is said."""
    program = "import torch; from foreword.ops import create_ops; create_ops('cpu', torch.float32, 'triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "set TRITON_INTERPRET=1 before Python starts, or use kernels='auto'" in done.stderr


@pytest.mark.skipif(not INTERPRETED, reason="without a GPU")
def test_a_gpu_is_not_used_through_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    """It would take minutes for a token; and no check that passes there is remembered of the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set, so the kernels would run"):
        create_ops("cuda:0", torch.bfloat16)
    with caplog.at_level("WARNING", "foreword"):
        assert choose_device("auto", "auto", tmp_path) == "cpu"
    assert "do not pass their check: TRITON_INTERPRET is set" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not INTERPRETED, reason="without a GPU")
def test_default_dtype_of_the_interpreter() -> None:
    """float32, as its bfloat16 is cut; bfloat16 on a GPU."""
    assert default_dtype("cpu", "triton") == torch.float32
    assert default_dtype("cuda") == torch.bfloat16
