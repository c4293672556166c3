"""What the model takes, what is left for KV, and what is said where that is too little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword import Engine, ModelLoadError
from foreword.engine import build as builder
from foreword.engine import memory
from foreword.engine.memory import DeviceMemory, GPUProbe, MainMemory, Room
from foreword.model.load import load_model
from foreword.model.size import weight_bytes
from foreword.scheduling.plan import StepPlan
from quantized_checkpoints import save_quantized
from support import tiny_options, tiny_token_bytes

GB = 10**9


class Fake:
    """A device of 10 GB, of which others use 1, where loading takes ``weights`` and a step ``activations``."""

    def __init__(self, weights: int = 0, activations: int = 0) -> None:
        self.weights, self.activations = weights, activations
        self.used = GB
        self.steps = 0

    def room(self) -> Room:
        return Room(10 * GB, 10 * GB - self.used)

    def peak(self, run: Callable[[], object]) -> int:
        run()
        self.steps += 1
        return self.activations

    def load(self) -> str:
        self.used += self.weights
        return "model"


def on(fake: Any, utilization: float = 0.9) -> DeviceMemory:
    return DeviceMemory("cuda", "some-model", utilization, fake)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize(("utilization", "left"), [(1.0, 4), (0.9, 3), (0.75, 1.5), (0.6, 0), (0.1, 0)])
def test_what_is_left_for_kv(utilization: float, left: float) -> None:
    """Of the share, after what others use, the weights and the largest step."""
    fake = Fake(weights=3 * GB, activations=2 * GB)
    memory = on(fake, utilization)
    fake.load()
    assert memory.for_kv(lambda: None, least=0) == left * GB
    assert fake.steps == 1


def test_weights_that_cannot_fit_are_not_loaded() -> None:
    """8 GB may be used: 9 of 10, and others use 1."""
    assert on(Fake()).load(lambda: "model", 8 * GB) == "model"
    with pytest.raises(
        ModelLoadError,
        match=r"some-model does not fit on cuda: its weights take about 8\.01 GB, and of 10\.00 GB, of which 9\.00 GB "
        r"are free, gpu_memory_utilization=0\.9 allows 8\.00 GB: give a smaller dtype or quantization",
    ):
        on(Fake()).load(lambda: pytest.fail("they were loaded"), 801 * GB // 100)


def test_what_runs_out_while_loading_says_the_same() -> None:
    with pytest.raises(ModelLoadError, match=r"does not fit on cuda: .*about 1\.00 GB") as caught:
        on(Fake()).load(out_of_memory, GB)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.__cause__.__traceback__ is None, "it would keep what was loaded"


def test_too_little_for_kv() -> None:
    """The numbers of all that takes a part; a step that does not even run needs all that was free."""
    fake = Fake(weights=5 * GB, activations=2 * GB)
    memory = on(fake)
    memory.load(fake.load, 5 * GB)
    assert memory.for_kv(lambda: None, least=GB) == GB
    with pytest.raises(
        ModelLoadError,
        match=r"too little memory for its KV cache on cuda: of 10\.00 GB, of which 4\.00 GB are free, "
        r"gpu_memory_utilization=0\.9 allows 3\.00 GB besides its weights of 5\.00 GB; a step takes 2\.00 GB, which "
        r"leaves 1\.00 GB, and KV needs 1\.50 GB: give a smaller max_num_batched_tokens",
    ):
        memory.for_kv(lambda: None, least=3 * GB // 2)
    with pytest.raises(ModelLoadError, match=r"a step takes 4\.00 GB and more, which leaves 0\.00 MB"):
        memory.for_kv(out_of_memory, least=1)


def test_what_a_gpu_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """By doubles of torch's calls: of 300 that are gone afterwards torch has kept 120; kernels took the others."""
    state, calls = {"free": 5000, "reserved": 1000, "peak": 9999}, list[str]()

    def step() -> None:
        state.update(free=4700, reserved=1120, peak=max(state["peak"], 3500))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (state["free"], 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: state["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: state["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: state.update(peak=state["reserved"]))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    assert GPUProbe("cuda").room() == Room(8000, 5000)
    assert calls == ["synchronize", "empty_cache"]
    assert GPUProbe("cuda").peak(step) == (3500 - 1000) + (300 - 120)


def test_main_memory_refuses_what_would_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With swap it would only be slow, and where the system does not tell nothing is refused."""
    free: dict[str, int | None] = {"MemAvailable": 2 * GB, "SwapFree": GB}
    monkeypatch.setattr(memory, "_memory_info", free.get)
    monkeypatch.setattr(memory, "_container_memory", lambda unlimited: unlimited)
    assert MainMemory("some-model").load(lambda: "model", 3 * GB) == "model"
    with pytest.raises(ModelLoadError, match=r"some-model does not fit in memory: .*about 4\.00 GB, and 2\.00 GB are"):
        MainMemory("some-model").load(lambda: "model", 4 * GB)
    free["MemAvailable"] = None
    assert MainMemory("some-model").load(lambda: "model", 4 * GB) == "model"
    assert memory.free_memory() > 0


def test_a_container_counts_files_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 600\nactive_file 200\ninactive_file 350\n")
    assert memory._container_memory(5000, tmp_path) == 1000 - (900 - 550)
    (tmp_path / "memory.max").write_text("300\n")  # lowered since
    assert memory._container_memory(5000, tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_memory(5000, tmp_path) == 5000
    assert memory._container_memory(5000, tmp_path / "nothing") == 5000


def test_the_weights_of_a_checkpoint(tiny_dir: Path) -> None:
    """2 layers of hidden 64, 128 inside, 4 and 2 heads of 16; 260 tokens, embedded and told apart by a head."""
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    head, rest = 260 * 64, 260 * 64 + 5 * 64
    assert weight_bytes(tiny_dir, torch.bfloat16, None) == (2 * (matrices + head), 2 * rest)
    assert weight_bytes(tiny_dir, torch.float32, "int8") == ((matrices + head) * 34 // 32, 4 * rest)
    assert weight_bytes(tiny_dir, torch.float32, "int4") == (matrices * 20 // 32 + head * 34 // 32, 4 * rest)


@pytest.mark.parametrize("layout", ["awq", "gptq desc_act", "fp8"])
def test_size_of_quantised_weights(layout: str, tiny_dir: Path, tmp_path: Path) -> None:
    """As they are they take a part; as numbers as much as those of a plain checkpoint."""
    stored = save_quantized(tiny_dir, tmp_path, layout)
    kept, plain = (weight_bytes(stored / name, torch.float32, None) for name in ("stored", "values"))
    assert kept.linear < plain.linear / 2
    for scheme in (None, "int8"):
        sizes = [weight_bytes(stored / name, torch.float32, scheme, as_stored=False) for name in ("stored", "values")]
        assert sizes[0].linear == sizes[1].linear


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: no complete safetensors file"):
        weight_bytes(tmp_path, torch.float32, None)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The CPU's memory is taken for a device's."""
    fake = Fake(activations=2 * GB)
    monkeypatch.setattr(builder, "memory_of", lambda _, model, share: DeviceMemory("fake", model, share, fake))
    monkeypatch.setattr(builder, "load_model", lambda *args, **kw: (fake.load(), load_model(*args, **kw))[1])
    return fake


def test_an_engine_runs_its_largest_step_first(tiny_dir: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as may be, of as many sequences, all of which sample; then the pool has what is left."""
    plans: list[StepPlan] = []
    execute = builder.ModelRunner.execute
    monkeypatch.setattr(builder.ModelRunner, "execute", lambda self, plan: (plans.append(plan), execute(self, plan))[1])
    fake.weights = 6 * GB - 1000 * 16 * tiny_token_bytes()
    with Engine(
        str(tiny_dir), **tiny_options() | {"kv_cache_memory": None}, max_num_batched_tokens=50, max_num_seqs=8
    ) as engine:
        assert [chunk.length for chunk in plans[0].chunks] == [7, 7, 6, 6, 6, 6, 6, 6]
        assert all(chunk.is_last for chunk in plans[0].chunks)
        stats = engine.stats()
        assert (stats.blocks_total, stats.steps, stats.kv_tiles_used, len(plans)) == (1000, 0, 0, 1)
        assert engine.generate([1, 2, 3], max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize(("options", "tokens"), [({}, 50), ({"enable_chunked_prefill": False}, 70)])
@pytest.mark.usefixtures("fake")
def test_a_prompt_that_is_not_split_counts_whole(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], tokens: int
) -> None:
    sizes = []
    monkeypatch.setattr(builder, "run_step", lambda *args: sizes.append(args[-1]))
    options |= {"kv_cache_memory": None, "max_num_batched_tokens": 50, "max_model_len": 70, "max_num_seqs": 2}
    with Engine(str(tiny_dir), **tiny_options() | options):
        assert sizes == [(tokens, 2, 70)]


def test_what_max_model_len_asks_for_must_fit(tiny_dir: Path, fake: Fake) -> None:
    """Without it, as much as there is will do; but a block at least."""
    options = tiny_options() | {"kv_cache_memory": None}
    fake.weights = 6 * GB - 20 * 16 * tiny_token_bytes()
    with pytest.raises(ModelLoadError, match=r"which leaves 0\.16 MB, and KV needs 0\.17 MB"):
        Engine(str(tiny_dir), **options, max_model_len=321)
    fake.used = GB
    with Engine(str(tiny_dir), **options, max_model_len=320) as engine:
        assert engine.stats().blocks_total == 20
    fake.used, fake.weights = GB, 6 * GB
    with pytest.raises(ModelLoadError, match="too little memory for its KV cache"):
        Engine(str(tiny_dir), **options)
