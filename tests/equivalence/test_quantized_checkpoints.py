"""Checkpoints of AWQ, GPTQ and 8-bit floats under whole engines, against plain checkpoints of the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword import Engine
from quantized_checkpoints import CONFIGS, save_quantized
from support import DEVICE, assert_same_bits, generate_recorded, native_kernels, on_device, random_ids, tiny_options

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
PROMPTS = [random_ids(seed, length) for seed, length in enumerate((3, 40))]
FOUR_BITS = [name for name in CONFIGS if "bits" in CONFIGS[name]]
KERNELS = native_kernels()[:1] if DEVICE == "cpu" else ["triton"]
Results = list[tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module")
def written(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint by the name of its configuration, and that of its values, once each."""
    made: dict[Any, Path] = {}

    def get(name: str, **options: Any) -> Path:
        key = (name, *options.items())
        if key not in made:
            made[key] = save_quantized(tiny_dir, tmp_path_factory.mktemp("quantized"), name, **options)
        return made[key]

    return get


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(directory: Path, **options: Any) -> Engine:
        made.append(Engine(str(directory), **on_device(tiny_options(num_threads=1, **options))))
        return made[-1]

    yield make
    for each in made:
        each.close()


def results(engine: Engine) -> Results:
    return generate_recorded(engine, PROMPTS, **GREEDY)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_quantization_the_values_are_those_of_the_checkpoint(
    name: str, written: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    """To the last bit, in float32."""
    directory = written(name)
    found, expected = (results(engine(directory / kind, kernels="torch")) for kind in ("stored", "values"))
    assert_same_bits(found, expected)


@pytest.mark.cpu
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", [name for name in FOUR_BITS if name != "gptq desc_act"])
def test_four_bits_stay_four_bits(
    name: str, kernels: str, written: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    """The native kernels compute with the same numbers and scales, to the last bit."""
    directory = written(name)
    options = {"kernels": kernels, "quantization": "int4"}
    found, expected = (engine(directory / kind, **options) for kind in ("stored", "values"))
    assert found.backend == expected.backend.replace("int4", CONFIGS[name]["quant_method"])
    assert_same_bits(results(found), results(expected))


@pytest.mark.cpu
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["awq", "gptq desc_act", "fp8"])
def test_eight_bits_that_are_asked_for_or_needed(
    name: str, kernels: str, written: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    """Weights are quantised anew to int8 when that is asked for, and where four bits lie in an order that the native
    kernels do not follow."""
    directory = written(name)
    wanted = "int4" if name == "gptq desc_act" else "int8"
    found = engine(directory / "stored", kernels=kernels, quantization=wanted)
    assert_same_bits(results(found), results(engine(directory / "values", kernels=kernels, quantization="int8")))


@pytest.mark.cpu
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["awq", "fp8 channels"])
def test_the_default_takes_what_is_stored(
    name: str, kernels: str, written: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    """By name in the backend, and the same as when it is asked for: four bits as they are, 8-bit floats as int8."""
    directory = written(name) / "stored"
    found = engine(directory, kernels=kernels, dtype="auto")
    same = {"quantization": "int4" if name == "awq" else "int8", "dtype": "bfloat16"}
    assert f" {'awq' if name == 'awq' else 'fp8'} weights, bfloat16 KV" in found.backend
    assert_same_bits(results(found), results(engine(directory, kernels=kernels, **same)))


@pytest.mark.parametrize("kernels", KERNELS)
def test_projections_that_were_left_as_they_are(
    kernels: str, written: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    """Alone in their product, or beside quantised ones."""
    directory = written("awq", plain=("layers.0.mlp.down_proj", "layers.1.self_attn.k_proj"))
    for options in ({"kernels": "torch"}, {"kernels": kernels, "quantization": "int8"}):
        found, expected = (results(engine(directory / kind, **options)) for kind in ("stored", "values"))
        assert_same_bits(found, expected)


def test_each_treatment_has_kv_of_its_own(written: Callable[..., Path], engine: Callable[..., Engine]) -> None:
    directory = written("awq") / "stored"
    ways: list[dict[str, Any]] = [
        {"quantization": None}, {"quantization": "int4"}, {"quantization": "int8"}, {"dtype": "bfloat16"},
    ]  # fmt: skip
    engines = [engine(directory, kernels="torch", **way) for way in ways]
    assert len({each._client._namespace_key("") for each in engines}) == len(ways)
