"""Decoders of every kind of layer: with the fused kernels and primitive by primitive, against the CPU's operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equivalence.harness import Bench, load
from equivalence.test_architectures import CASES, IDS, random_model
from foreword.ops.triton.backend import TritonOps
from foreword.ops.triton.layers import TritonLayers

LENGTH = 40
TOLERANCE = 1e-4


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "primitives"])
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",  # norms of heads and behind blocks, two rotations, windows
        pytest.param("gemma2", marks=pytest.mark.soak),  # soft-caps
        pytest.param("llama-biased", marks=pytest.mark.soak),
        pytest.param("qwen3", marks=pytest.mark.soak),
        pytest.param("smollm3-sliding", marks=pytest.mark.soak),  # layers without rotation
    ],
)
@torch.inference_mode()
def test_logits(name: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks and a token, of which some rows are wanted."""
    case = CASES[IDS.index(name)]
    layers = (
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    )
    random_model(type(case)(name, case.model, case.options | {"sliding_window": 25} | layers)).save_pretrained(tmp_path)
    if not fused:
        monkeypatch.setattr(TritonOps, "fuse", lambda *_: None)
    tokens = torch.randint(3, 199, (LENGTH + 1,), generator=torch.Generator().manual_seed(5)).tolist()
    results = []
    for kernels in ("torch", "triton"):
        bench = Bench(load(tmp_path, torch.float32, kernels))
        sequence = bench.sequence(LENGTH + 1, scatter=1)
        outputs = [bench.step([(sequence, tokens[:23])], outputs=[3, 22])]
        outputs.append(bench.step([(sequence, tokens[23:LENGTH])], outputs=[]))
        outputs.append(bench.step([(sequence, tokens[LENGTH:])]))
        results.append(torch.cat([rows for step in outputs for rows in step]))
    assert isinstance(bench.decoder._fused, TritonLayers) == fused
    assert results[0].std() > 0.1
    assert (results[0] - results[1]).abs().max() <= TOLERANCE
