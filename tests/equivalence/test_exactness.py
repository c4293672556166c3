"""The same prompt gives the same logits, bit for bit, however it came to be computed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from foreword import Engine
from support import (
    DEVICE,
    assert_idle,
    assert_same_bits,
    cold,
    compute_paths,
    generate_recorded,
    kernels_under_test,
    random_ids,
    soaking,
)

Options = dict[str, Any]
TinyEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
LENGTHS = [1, 2, 5, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200, 257]
if DEVICE == "interpreter":
    LENGTHS = [1, 17, 33]
PROMPTS = [random_ids(seed, length) for seed, length in enumerate(LENGTHS)]

KERNELS = kernels_under_test()
PATHS = compute_paths(KERNELS)
FEWER = [path for path in PATHS if path.id not in ("torch-bfloat16", "torch-int4")]
"""Quantised weights are plain bfloat16 or float32 ones to the torch operations, which take the most time here."""
BEST = KERNELS[:2][-1]


def is_quick(name: str) -> bool:
    """Every storage on the kernels that are used here; plain and quantised weights, which is KV in either type, on the
    others. The others' other storages have their own kernels' tests, and random traffic below."""
    return name.startswith(f"{BEST}-") or name.endswith(("-float32", "-int8"))


SOME = soaking(FEWER, is_quick)
paths = pytest.mark.parametrize("path", SOME)
CHUNKED = [
    pytest.param(path.values[0], budget, id=f"{path.id}-{budget}", marks=path.marks)
    for path in SOME
    for budget in [1, 2, 3, 7, 16, 61, 130, 500]
]
CHUNKED = soaking(
    CHUNKED, lambda name: name.startswith(BEST) or re.search("-(7|61|130)$|portable-float32-1$", name) is not None
)
"""Every budget on the best kernels; elsewhere those that divide nothing, and on the plain C one token at a time."""
MIXED = [
    pytest.param(path.values[0], budget, seats, id=f"{path.id}-{budget}-{seats}", marks=path.marks)
    for path in SOME
    for budget, seats in [(512, 64), (40, 64), (17, 5), (64, 2)]
]
MIXED = soaking(MIXED, lambda name: not name.startswith("torch") or name.endswith(("-40-64", "-17-5")))
NOT_TORCH = soaking(SOME, lambda name: not name.startswith("torch"))
"""Without the torch operations, which take most of the time."""


def twice(name: str, less: Any, more: Any) -> Any:
    """Parametrise ``path`` and ``name``: two values, of which the torch operations have but the first one."""
    cases = [pytest.param(*path.values, less, id=f"{less}-{path.id}", marks=path.marks) for path in SOME]
    cases += [pytest.param(*path.values, more, id=f"{more}-{path.id}", marks=path.marks) for path in NOT_TORCH]
    return pytest.mark.parametrize(("path", name), cases)


@pytest.fixture(scope="module", params=SOME)
def reference(request: pytest.FixtureRequest, tiny: TinyEngine) -> tuple[Options, list[Any]]:
    """Options that force a way to compute; and each prompt alone, in one piece, on an empty cache."""
    engine = tiny(**request.param, max_num_batched_tokens=512)
    return request.param, cold(engine, PROMPTS, **GREEDY)


def block_sizes(path: Options, *sizes: int) -> list[int]:
    """Those of ``sizes`` that the kernels know."""
    return [size for size in sizes if path["kernels"] in ("torch", "triton") or size % 16 == 0]


@pytest.mark.cpu
def test_every_path_is_covered() -> None:
    """The native kernels found here are all tested, with plain, 8-bit and 4-bit weights and 8-bit KV; and torch is."""
    assert len(FEWER) == 5 * len(KERNELS[1:]) + 3


@pytest.mark.parametrize(("reference", "budget"), CHUNKED, indirect=["reference"], scope="module")
def test_any_split_into_chunks(reference: tuple[Options, list[Any]], tiny: TinyEngine, budget: int) -> None:
    """Prompts cut into chunks of any size give the bits of the whole."""
    path, expected = reference
    engine = tiny(**path, max_num_batched_tokens=budget)
    steps = engine.stats().steps
    assert_same_bits(cold(engine, PROMPTS, **GREEDY), expected)
    chunks = sum(-(-length // budget) for length in LENGTHS)
    assert engine.stats().steps - steps == chunks + 5 * len(PROMPTS)


@pytest.mark.parametrize(("reference", "budget", "seats"), MIXED, indirect=["reference"], scope="module")
def test_any_batch_mix(reference: tuple[Options, list[Any]], tiny: TinyEngine, budget: int, seats: int) -> None:
    """Next to any mix of prefilling and decoding neighbours, the bits are those of the request alone."""
    path, expected = reference
    engine = tiny(**path, max_num_batched_tokens=budget, max_num_seqs=seats)
    engine.reset_prefix_cache()
    assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
    assert_same_bits(generate_recorded(engine, PROMPTS[::-1], **GREEDY), expected[::-1])


def test_without_chunked_prefill_and_without_prefix_cache(
    reference: tuple[Options, list[Any]], tiny: TinyEngine
) -> None:
    """Neither option changes a bit; without the prefix cache nothing is reused or kept."""
    path, expected = reference
    engine = tiny(**path, enable_chunked_prefill=False, max_num_batched_tokens=50)
    assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
    engine = tiny(**path, enable_prefix_caching=False)
    for _ in range(2):
        assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
    stats = assert_idle(engine)
    assert (stats.tokens_reused, stats.blocks_cached) == (0, 0)


def test_any_block_size(reference: tuple[Options, list[Any]], tiny: TinyEngine) -> None:
    """Logits do not depend on the block size, cold or warm."""
    path, expected = reference
    for block_size in block_sizes(path, 1, 2, 8, 32, 64, 128):
        engine = tiny(**path, block_size=block_size, blocks=4096 // block_size)
        engine.reset_prefix_cache()
        assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
        assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
        assert engine.stats().tokens_reused >= sum(LENGTHS) - len(LENGTHS)


def test_warm_equals_cold(reference: tuple[Options, list[Any]], tiny: TinyEngine) -> None:
    """A wholly cached prompt computes one token and gives the cold bits."""
    path, expected = reference
    engine = tiny(**path, max_num_batched_tokens=512)
    engine.reset_prefix_cache()
    engine.generate(PROMPTS, **GREEDY)
    before = engine.stats()
    assert_same_bits(generate_recorded(engine, PROMPTS, **GREEDY), expected)
    after = engine.stats()
    assert after.tokens_reused - before.tokens_reused == sum(LENGTHS) - len(LENGTHS)
    assert after.tokens_prefilled - before.tokens_prefilled == len(LENGTHS)


@twice("block_size", 4, 16)
def test_cached_prefix_of_every_length(tiny: TinyEngine, path: Options, block_size: int) -> None:
    """A prefix that ends at any offset inside a block is copied on write, exact to the token and to the bit."""
    block_size = block_sizes(path, block_size, 2 * 16)[0]
    engine = tiny(**path, block_size=block_size, blocks=4096 // block_size)
    base = random_ids(1, 40 + block_size + 1)
    whole = cold(engine, [base], **GREEDY)
    for common in range(38, 40 + block_size + 1):
        prompt = [*base[:common], (base[common] + 1) % 256, *random_ids(common, 9)]
        expected = cold(engine, [prompt], **GREEDY)
        engine.reset_prefix_cache()
        engine.generate(base, **GREEDY)
        before = engine.stats().tokens_reused
        assert_same_bits(generate_recorded(engine, [prompt], **GREEDY), expected)
        assert engine.stats().tokens_reused - before == common
        assert_same_bits(generate_recorded(engine, [base], **GREEDY), whole)


@twice("budget", 19, 512)
def test_preempted_equals_undisturbed(tiny: TinyEngine, path: Options, budget: int) -> None:
    """Requests that lose their blocks and come back give complete output, bit for bit."""
    prompts = [random_ids(seed, 10 + 3 * seed) for seed in range(6)]
    options = {**GREEDY, "max_tokens": 60}
    expected = cold(tiny(**path, max_num_batched_tokens=512), prompts, **options)
    small = tiny(**path, blocks=14, max_num_batched_tokens=budget)
    small.reset_prefix_cache()
    before = small.stats().preemptions
    assert_same_bits(generate_recorded(small, prompts, **options), expected)
    assert small.stats().preemptions > before, "the pool was meant to be too small"
    assert_idle(small)


@paths
def test_after_evictions_in_scattered_blocks(tiny: TinyEngine, path: Options) -> None:
    """Blocks that are evicted, reused and lie scattered change nothing."""
    block_size = block_sizes(path, 4, 16)[0]
    engine = tiny(**path, blocks=30 if block_size == 4 else 20, block_size=block_size, max_num_batched_tokens=512)
    prompts = [random_ids(seed % 7, 8 + 5 * (seed % 9)) for seed in range(40)]
    options = {**GREEDY, "max_tokens": 3}
    expected = cold(tiny(**path, max_num_batched_tokens=512), prompts, **options)
    for start in range(0, 40, 5):
        group = slice(start, start + 5)
        assert_same_bits(generate_recorded(engine, prompts[group], **options), expected[group])
    held = engine._loop.core.scheduler.cache
    assert engine.stats().evictions > 30
    assert held.allocator.num_cached > 0
    assert_idle(engine)


@paths
def test_n_completions_are_those_of_single_requests(tiny: TinyEngine, path: Options) -> None:
    """Greedy: each of n equals the single run. Sampled: completion 0 equals n=1 of that seed, in any company."""
    engine = tiny(**path, max_num_batched_tokens=512)
    for length in (15, 16, 21):
        prompt = random_ids(length, length)
        single = cold(engine, [prompt], **GREEDY)
        engine.reset_prefix_cache()
        assert_same_bits(generate_recorded(engine, [prompt], n=4, **GREEDY), single * 4)
        sampled: dict[str, Any] = {"max_tokens": 8, "seed": 11, "ignore_eos": True}
        single = cold(engine, [prompt], **sampled)
        engine.reset_prefix_cache()
        four = generate_recorded(engine, [prompt], n=4, **sampled)
        assert_same_bits(four[:1], single)
        tiny_pool = tiny(**path, blocks=5, max_num_batched_tokens=23)
        assert_same_bits(generate_recorded(tiny_pool, [prompt], n=4, **sampled), four)
        few_seats = tiny(**path, max_num_seqs=2)
        assert_same_bits(generate_recorded(few_seats, [prompt, *PROMPTS[:4]], n=4, **sampled)[:4], four)


@paths
def test_a_conversation_continues_from_the_cache(tiny: TinyEngine, path: Options) -> None:
    """Each turn extends the last one's prompt and answer; all but its own tokens are reused."""
    engine = tiny(**path, max_num_batched_tokens=512)
    engine.reset_prefix_cache()
    history, turns, known = random_ids(3, 21), [], 0
    for turn in range(5):
        before = engine.stats().tokens_reused
        turns += generate_recorded(engine, [history], **GREEDY)
        assert engine.stats().tokens_reused - before == known
        known = len(history) + len(turns[-1][0]) - 1
        history = history + turns[-1][0] + random_ids(turn, 7)
    history = random_ids(3, 21)
    for turn in range(5):
        assert_same_bits(turns[turn : turn + 1], cold(engine, [history], **GREEDY))
        history = history + turns[turn][0] + random_ids(turn, 7)


@paths
def test_a_warm_up_that_ended_at_a_stop_string_changes_nothing(tiny: TinyEngine, path: Options) -> None:
    """What a stopped request left in the cache does not change later output."""
    engine = tiny(**path)
    prompt = random_ids(5, 30)
    long: dict[str, Any] = {**GREEDY, "max_tokens": 24}
    expected = cold(engine, [prompt], **long)
    engine.reset_prefix_cache()
    stop_id = expected[0][0][9]
    stopped = engine.generate(prompt, **{**long, "stop_token_ids": [stop_id]})
    assert stopped.finish_reason == "stop"
    assert_same_bits(generate_recorded(engine, [prompt], **long), expected)


# -- the real model --------------------------------------------------------------------------------------------

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Überraschung: 東京は日本の首都です。 " * 3,
    "Once upon a time there was a small village by the sea. " * 12,  # more than a tile
]
REAL: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


REAL_PATHS = [
    pytest.param({"kernels": BEST, "dtype": "bfloat16", "quantization": "int8"}, id="int8"),
    pytest.param({"kernels": BEST, "dtype": "bfloat16", "quantization": "int4"}, id="int4"),
    pytest.param({"kernels": BEST, "dtype": "bfloat16", "quantization": None}, id="bfloat16"),
    pytest.param(
        {"kernels": BEST, "dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"}, id="int4-int8-KV"
    ),
    pytest.param({"kernels": BEST, "dtype": "float32", "quantization": None}, id="float32", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("path", soaking(REAL_PATHS, lambda name: name in ("int8", "int4-int8-KV")))
def test_real_model_chunks_batches_and_cache(module_engines: TinyEngine, path: Options) -> None:
    """On the real model: whole, in chunks, batched, warm and with a copied block, the same bits."""
    engine = module_engines("smollm2-135m", **path, kv_cache_memory="192MiB")
    expected = cold(engine, TEXTS, **REAL)
    engine.reset_prefix_cache()
    assert_same_bits(generate_recorded(engine, TEXTS, **REAL), expected)
    before = engine.stats().tokens_reused
    assert_same_bits(generate_recorded(engine, TEXTS, **REAL), expected)
    assert engine.stats().tokens_reused - before == sum(engine.count_tokens(text) - 1 for text in TEXTS)

    ids = engine.encode(TEXTS[3])
    cut = [*ids[:77], *engine.encode(" and then")]
    expected_cut = cold(engine, [cut], **REAL)
    engine.generate(ids, **REAL)
    before = engine.stats().tokens_reused
    assert_same_bits(generate_recorded(engine, [cut], **REAL), expected_cut)
    assert engine.stats().tokens_reused - before >= 77

    chunked = module_engines("smollm2-135m", **path, kv_cache_memory="24MiB", max_num_batched_tokens=37, block_size=32)
    assert_same_bits(generate_recorded(chunked, TEXTS, **REAL), expected)


@pytest.mark.parametrize("path", soaking(REAL_PATHS, lambda name: name in ("int8", "int4-int8-KV")))
def test_real_model_preempted(module_engines: TinyEngine, path: Options) -> None:
    """On the real model in a pool that is too small: preempted and resumed, the same bits."""
    engine = module_engines("smollm2-135m", **path, kv_cache_memory="192MiB")
    options = {**REAL, "max_tokens": 20}
    prompts = [engine.encode(text)[:12] for text in TEXTS]
    expected = cold(engine, prompts, **options)
    block = engine._loop.core.runner.pool.geometry.bytes_per_token * 16
    small = module_engines("smollm2-135m", **path, kv_cache_memory=5 * block, max_num_batched_tokens=64)
    assert_same_bits(generate_recorded(small, prompts, **options), expected)
    assert small.stats().preemptions > 0


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=pytest.mark.soak) if i % 2 else i for i in range(2 * len(FEWER))]
)
def test_random_traffic_is_exact(tiny: TinyEngine, new_tiny: TinyEngine, seed: int) -> None:
    """Batches that share prefixes at random, with n and sampling, in small pools: every row as if alone and cold."""
    rng = random.Random(seed)
    path: Options = FEWER[seed // 2].values[0]  # type: ignore[assignment]
    reference = tiny(**path, max_num_batched_tokens=512)
    block_size = rng.choice(block_sizes(path, 2, 4, 8, 16))
    engine = new_tiny(
        **path,
        block_size=block_size,
        blocks=rng.randint(160, 260) // block_size,
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.choice([9, 33, 120]),
        enable_chunked_prefill=rng.random() < 0.8,
        scheduling_policy=rng.choice(["fcfs", "priority", "shortest_prefill_first", "longest_prefix_match"]),
    )
    known = [random_ids(seed, 150)]
    for _ in range(6):
        prompts = []
        for _ in range(rng.randint(1, 8)):
            prompt = rng.choice(known)
            prompt = prompt[: rng.randint(1, min(len(prompt), 110))] + random_ids(
                rng.randint(0, 9**9), rng.randint(0, 20)
            )
            prompts.append(prompt)
        options = {
            "max_tokens": rng.randint(1, 25),
            "n": rng.choice([1, 1, 2, 3]),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": seed,
            "ignore_eos": rng.random() < 0.5,
        }
        found = generate_recorded(engine, prompts, **options)
        assert_same_bits(found, cold(reference, prompts, **options))
        assert_idle(engine)
        known += prompts
    assert engine.stats().tokens_reused > 0
    assert engine.stats().evictions > 0
