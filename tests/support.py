"""What several test files need: a tiny checkpoint, recorded logits, prompts."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from foreword import Engine, EngineStats
    from foreword.kv.pool import KVPool
    from foreword.kv.tiers import Lanes

DEVICES = ("cpu", "cuda", "interpreter")
DEVICE = "cpu"
"""What engines under test compute on: one of :data:`DEVICES`, the last being Triton's kernels without a GPU. Settled
by ``--device`` before tests are collected."""

TINY_BOS, TINY_EOS = 256, 257
TINY_VOCAB = 260
TINY_KV_ROWS = 2 * 2 * 2  # of a token: 2 layers, key and value, 2 heads
TINY_ROW_BYTES = {"float32": 4 * 16, "bfloat16": 2 * 16, "int8": 16 + 4, "fp8": 16}


def save_tiny_llama(directory: Path, positions: int = 2048) -> Path:
    """A llama whose tokens 0 to 255 are the bytes themselves. Weights are large enough for every token to matter."""
    special = {"bos_token_id": TINY_BOS, "eos_token_id": TINY_EOS}
    _save_llama(directory, vocab_size=TINY_VOCAB, max_position_embeddings=positions, **special)
    save_byte_tokenizer(directory)
    return directory


def save_tiny_chat(directory: Path, model: Path) -> Path:
    """The same llama with the tokenizer, the chat template and the context length of the checkpoint in ``model``."""
    config = json.loads((model / "config.json").read_text())
    names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    _save_llama(directory, **{name: config[name] for name in names})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, directory)
    return directory


def _save_llama(directory: Path, **options: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        tie_word_embeddings=False,
        **options,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(directory)


def save_byte_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges, in the files of a Hugging Face checkpoint."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<user>", "<model>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '<user>' if m.role == 'user' else '<model>' }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
    )
    options = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))


def use_device(device: str) -> None:
    """Let engines under test compute on ``device``, before torch and Triton are imported, which look at the environment
    then. A GPU that is not wanted is hidden, so that tests on the CPU are the same on every machine.

    Raises:
        RuntimeError: there is no GPU.
    """
    global DEVICE
    DEVICE = device
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("--device cuda: torch finds no GPU")
        return
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    if device == "interpreter":
        from interpreter import prepare

        prepare()


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` for an engine on the device under test; on a GPU Triton's kernels stand for those of the CPU.

    Options that name a device stay as they are.
    """
    if DEVICE == "cpu" or "device" in options:
        return options
    device = "cuda" if DEVICE == "cuda" else "cpu"
    return {**options, "device": device, "kernels": "triton", "deterministic": True}


def kernels_under_test() -> list[str]:
    """On the CPU torch's operations and all native kernels that this machine runs, the best first; else Triton's."""
    from foreword.ops.cpu.native.library import available

    return ["torch", *available()] if DEVICE == "cpu" else ["triton"]


def native_kernels() -> list[Any]:
    """Parameters: every set of native kernels that this machine runs; one that is skipped, visibly, without any."""
    import pytest

    from foreword.ops.cpu.native.library import available

    absent = pytest.mark.skip(reason="the package was built without a C compiler: there are no native kernels to test")
    return list(available()) or [pytest.param("none", marks=absent)]


def compute_paths(kernels: list[Any]) -> list[Any]:
    """Parameters: engine options that force each of ``kernels`` with every storage of the weights and of the KV."""
    import pytest

    schemes: dict[str, dict[str, Any]] = {
        "float32": {"dtype": "float32", "quantization": None},
        "bfloat16": {"dtype": "bfloat16", "quantization": None},
        "int8": {"dtype": "bfloat16", "quantization": "int8"},
        "int4": {"dtype": "float32", "quantization": "int4"},
        "int8-KV": {"dtype": "float32", "quantization": None, "kv_cache_dtype": "int8"},
    }
    if DEVICE != "cpu":
        schemes["fp8-KV"] = {"dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "fp8"}
    if DEVICE == "interpreter":  # which is wrong in bfloat16
        del schemes["bfloat16"]
        schemes = {scheme: {**options, "dtype": "float32"} for scheme, options in schemes.items()}
    return [
        pytest.param({"kernels": name, **options}, id=f"{name}-{scheme}")
        for name in kernels
        for scheme, options in schemes.items()
    ]


def soaking(params: list[Any], is_quick: Callable[[str], bool]) -> list[Any]:
    """``params``, of which those by whose id ``is_quick`` says no are left to ``make soak``."""
    import pytest

    return [
        p if is_quick(p.id) else pytest.param(*p.values, id=p.id, marks=[*p.marks, pytest.mark.soak]) for p in params
    ]


def fill_with_nan(pool: KVPool) -> None:
    """Every slot as if a failed request had left it."""
    pool.data.fill_(float("nan") if pool.data.is_floating_point() else -1)  # a scale of -1s is NaN


def tiny_token_bytes(dtype: str = "float32", kv_cache_dtype: str = "auto") -> int:
    """Bytes of KV of one token of the tiny model."""
    kept = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    return TINY_KV_ROWS * TINY_ROW_BYTES.get(kept, TINY_ROW_BYTES["bfloat16"])


def tiny_options(*, blocks: int = 256, block_size: int = 16, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    """Options of a tiny engine whose pool has exactly ``blocks`` blocks."""
    if options.get("kernels") == "torch":
        options.setdefault("num_threads", 1)  # operations this small only wait for each other on more
    memory = blocks * block_size * tiny_token_bytes(dtype, options.get("kv_cache_dtype", "auto"))
    return {"block_size": block_size, "dtype": dtype, "kv_cache_memory": memory, **options}


class Inline(Executor):
    """Runs what is submitted at once, on the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def inline_lanes() -> Lanes:
    """Copies are done when they are asked for."""
    from foreword.kv.tiers import Lanes

    return Lanes(Inline(), Inline(), threading.Event())


def random_ids(seed: int, count: int) -> list[int]:
    """Token ids of the tiny model."""
    return random.Random(seed).choices(range(256), k=count)


Rows = dict[tuple[str, int], list["Tensor"]]
"""By request id and completion: the logits its tokens were sampled from, in order."""


@contextmanager
def recorded(engine: Engine) -> Iterator[Rows]:
    """Record every row of logits that ``engine`` samples from; no position may be sampled twice."""
    runner, rows, seen = engine._loop.core.runner, Rows(), set[tuple[str, int, int]]()
    original = runner._sample

    def sample(sequences: list[Any], logits: Tensor) -> Any:
        for sequence, row in zip(sequences, logits, strict=True):
            for index in range(sequence.index, sequence.index + sequence.num_samples):
                key = (sequence.request.request_id, index)
                place = (*key, len(sequence.token_ids))
                assert place not in seen, f"{place} was sampled twice"
                seen.add(place)
                rows.setdefault(key, []).append(row.to("cpu", copy=True))
        return original(sequences, logits)

    runner._sample = sample  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del runner._sample


def generate_recorded(engine: Engine, prompts: list[Any], **sampling: Any) -> list[tuple[list[int], Tensor]]:
    """One batch: per completion of each prompt its token ids and the logits ``[tokens, V]`` behind them."""
    import torch

    with recorded(engine) as rows:
        outputs = engine.generate(prompts, **sampling)
    return [
        (completion.token_ids, torch.stack(rows[output.request_id, completion.index]))
        for output in outputs
        for completion in output.outputs
    ]


def assert_same_bits(actual: Iterable[tuple[list[int], Tensor]], expected: Iterable[tuple[list[int], Tensor]]) -> None:
    """Equal tokens, and logits equal to the last bit."""
    import torch

    for number, ((ids, logits), (wanted_ids, wanted)) in enumerate(zip(actual, expected, strict=True)):
        assert ids == wanted_ids, f"tokens of case {number} differ"
        assert torch.equal(logits, wanted), f"logits of case {number} differ by {(logits - wanted).abs().max()}"


def cold(engine: Engine, prompts: list[Any], **sampling: Any) -> list[tuple[list[int], Tensor]]:
    """The reference: each prompt alone, on an empty cache."""
    results = []
    for prompt in prompts:
        engine.reset_prefix_cache()
        results += generate_recorded(engine, [prompt], **sampling)
    return results


def assert_idle(engine: Engine) -> EngineStats:
    """Nothing runs, nothing waits, and every block is free or cached. Returns the counters."""
    engine.save()  # what is on its way to a tier holds its blocks
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0), stats
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    for home in engine._loop.core.scheduler.homes:
        assert not home.busy
        assert home.allocator.num_held == 0
        assert home.allocator.num_evictable == home.allocator.num_cached
    return stats
