"""All layers in one native call against the same layers primitive by primitive in torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.harness import Bench, load
from equivalence.test_architectures import CASES, IDS, Case, random_model
from foreword.core.errors import ModelLoadError
from foreword.model.decoder import Decoder
from foreword.ops.cpu.native.library import available
from support import native_kernels, soaking

paths = pytest.mark.parametrize("kernels", native_kernels())
BY_KERNELS = soaking(
    [pytest.param(name, case, id=f"{name}-{case.name}") for name in available() for case in CASES],
    lambda name: name.startswith(f"{available()[0]}-") or name.endswith(("-llama-biased", "-gemma2", "-qwen3")),
)
"""Every architecture on the best kernels; on the others those with biases, softcaps and windows, norms of heads."""

TOKENS = torch.randint(3, 199, (180,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for case in CASES:
        made[case.name] = tmp_path_factory.mktemp(case.name)
        random_model(case).save_pretrained(made[case.name])
    return made


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@paths
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_fused_layers_equal_composed_ones(kernels: str, case: Case, checkpoints: dict[str, Path]) -> None:
    """Every architecture, in float32: windows, norms behind branches and of heads, biases, softcaps, no rotation."""
    fused = load(checkpoints[case.name], torch.float32, kernels)
    composed = load(checkpoints[case.name], torch.float32, "torch")
    assert fused._fused is not None
    assert composed._fused is None
    chunks = [150, 20, 1, 1]
    found, expected = (Bench(decoder).run(TOKENS, chunks, scatter=1) for decoder in (fused, composed))
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


BY_SCHEME = [
    pytest.param(*each.values, scheme, id=f"{each.id}-{scheme}", marks=each.marks)
    for each in BY_KERNELS
    for scheme in ("int8", "int4")
]
BY_SCHEME = soaking(BY_SCHEME, lambda name: name.endswith("-int8") or "-llama-biased-" in name or "-gemma2-" in name)
"""Architectures know nothing of the bits of the weights."""


@pytest.mark.parametrize(("kernels", "case", "scheme"), BY_SCHEME)
def test_quantised_layers_are_near_those_of_torch(
    kernels: str, case: Case, scheme: Any, checkpoints: dict[str, Path]
) -> None:
    """The same stored weights; the native layers also keep activations in 8 bits, so logits differ a little."""
    native, plain = (load(checkpoints[case.name], torch.float32, name, scheme) for name in (kernels, "torch"))
    found, expected = (Bench(decoder).run(TOKENS, [170, 1, 1], scatter=2) for decoder in (native, plain))
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.06


@paths
def test_native_primitives_compose_to_the_fused_layers(kernels: str, checkpoints: dict[str, Path]) -> None:
    """Run primitive by primitive on the native ops, too, the layers give nearly the fused result."""
    for name in ("llama-biased", "gemma2", "qwen3"):
        decoders: list[Decoder] = [load(checkpoints[name], torch.float32, kernels) for _ in range(2)]
        decoders[1]._fused = None
        found, expected = (Bench(decoder).run(TOKENS, [90]) for decoder in decoders)
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", *native_kernels()])
@pytest.mark.parametrize(("threads", "scheme"), [(1, None), (3, "int8"), (3, "int4")])
@pytest.mark.parametrize("name", ["llama-biased", "gemma2", "qwen3"])
def test_rows_that_are_not_wanted_change_no_bit(
    kernels: str, name: str, threads: int, scheme: Any, checkpoints: dict[str, Path]
) -> None:
    """Whichever rows' results are asked for, they and all keys and values are those of asking for all."""
    torch.set_num_threads(threads)
    decoder = load(checkpoints[name], torch.bfloat16, kernels, scheme)
    bench = Bench(decoder)
    first, second = bench.sequence(60), bench.sequence(60)
    expected = torch.cat(bench.step([(first, TOKENS[:40]), (second, TOKENS[40:50])]))
    after = bench.step([(first, TOKENS[50:51]), (second, TOKENS[51:53])])
    for outputs in ([], [0], [49], [39, 49], [3, 4, 11, 12, 40, 41, 42], range(1, 50), range(50)):
        bench = Bench(decoder)
        first, second = bench.sequence(60), bench.sequence(60)
        found = bench.step([(first, TOKENS[:40]), (second, TOKENS[40:50])], outputs)[0]
        assert torch.equal(found, expected[list(outputs)])
        found_after = bench.step([(first, TOKENS[50:51]), (second, TOKENS[51:53])])
        assert all(map(torch.equal, found_after, after))


@paths
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_any_number_of_threads_gives_the_same_bits(kernels: str, scheme: Any, checkpoints: dict[str, Path]) -> None:
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(1)  # quantising is a thousand small operations, at each of which two would wait
        decoder = load(checkpoints["gemma2"], torch.bfloat16, kernels, scheme, threads)
        torch.set_num_threads(threads)
        results.append(Bench(decoder).run(TOKENS, [100, 1, 1, 40]))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_vector_widths_give_the_same_bits(scheme: Any, checkpoints: dict[str, Path]) -> None:
    """AVX2 and AVX-512, with and without VNNI, as far as the processor has them."""
    widths = [name for name in available() if name.startswith("avx")]
    if len(widths) < 2:
        pytest.skip("this processor, or this installation, has fewer than two of the kernels that are compared")
    results = []
    for kernels in widths:
        decoder = load(checkpoints["gemma2"], torch.bfloat16, kernels, scheme)
        results.append(Bench(decoder).run(TOKENS, [100, 1, 1, 40]))
    assert all(torch.equal(result, results[0]) for result in results)


@paths
def test_busy_neighbours_change_no_bit(kernels: str, checkpoints: dict[str, Path]) -> None:
    """With other programs on every processor the pool gives up its threads for a while, and takes them back."""
    torch.set_num_threads(2)
    decoder = load(checkpoints["llama3"], torch.bfloat16, kernels, "int8")
    expected = Bench(decoder).run(TOKENS)
    spin = [sys.executable, "-c", "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"]
    neighbours = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for _ in range(10):
            assert torch.equal(Bench(decoder).run(TOKENS), expected)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert torch.equal(Bench(decoder).run(TOKENS), expected)


@paths
def test_a_nan_in_one_sequence_leaves_its_neighbours_alone(kernels: str, checkpoints: dict[str, Path]) -> None:
    """A token whose embedding is NaN spoils its sequence, and no other one's bits, in the same pass or later."""
    decoder = load(checkpoints["llama3"], torch.bfloat16, kernels, "int8")
    decoder._embedding = decoder._embedding.clone()
    decoder._embedding[198] = torch.nan
    healthy = [token for token in TOKENS if token != 198][:50]
    expected = Bench(decoder).run(healthy)
    bench = Bench(decoder)
    bad, good = bench.sequence(60), bench.sequence(60)
    spoiled, found = bench.step([(bad, [*healthy[:20], 198, *healthy[:9]]), (good, healthy)])
    assert torch.isnan(spoiled[20:]).all()
    assert torch.equal(spoiled[:20], expected[:20]), "what came before may be another's beginning"
    assert torch.equal(found, expected)
    bench.free = bad.blocks  # the next sequence gets blocks full of NaN
    assert torch.equal(bench.run(healthy), expected)


def test_blocks_of_a_wrong_size_are_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A damaged tensor of packed weights is a ModelLoadError with its name, not a crash."""
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoints["smollm2"] / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoints["smollm2"] / "config.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight.q8_0"  # [144, 96]
    for damaged in (
        torch.zeros(144, 3 * 34 - 1, dtype=torch.uint8),
        torch.zeros(143, 3 * 34, dtype=torch.uint8),
        torch.zeros(144 * 3 * 34, dtype=torch.uint8),
        torch.zeros(144, 3 * 34, dtype=torch.int8),
        torch.zeros(144, 3 * 34),
    ):
        save_file({**weights, name: damaged}, tmp_path / "model.safetensors")
        for kernels in ("torch", *[k for k in native_kernels() if isinstance(k, str)]):
            with pytest.raises(ModelLoadError, match=r"model\.safetensors.*up_proj\.weight\.q8_0"):
                load(tmp_path, torch.bfloat16, kernels, "int8")
    save_file({**weights, name: torch.zeros(144, 3 * 34, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    load(tmp_path, torch.bfloat16, "torch", "int8")
