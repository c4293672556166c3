"""Traps of other engines that show only at the whole engine. The others are tested where they live:

1, 3, 4, 12, 18 equivalence/test_exactness.py    5, 15 unit/kv/test_tree.py, property/test_cache_model.py
6, 7, 9 unit/kv/test_namespace.py    13, 14, 19, 20, 29 property/test_scheduler.py    16, 30 unit/kv/test_eviction.py
20 faults/test_concurrency.py    23, 24 unit/engine/test_request_state.py    28 unit/engine/test_kv_dtype.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword import Engine, SamplingParams
from foreword.engine.request_state import RequestState
from support import TINY_BOS, assert_idle, assert_same_bits, cold, generate_recorded, random_ids

TinyEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@contextmanager
def saying(engine: Engine, data: bytes) -> Iterator[None]:
    """The engine computes as ever, but every request says ``data``, byte by byte."""
    runner = engine._loop.core.runner
    original = runner._sample

    def sample(sequences: list[Any], logits: torch.Tensor) -> Any:
        said = torch.full_like(logits, -1000.0)
        for row, sequence in zip(said, sequences, strict=True):
            row[data[len(sequence.token_ids) - sequence.num_prompt]] = 1000.0
        return original(sequences, said)

    runner._sample = sample  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner._sample


def test_prompt_logprobs_bypass_reads_and_still_write(tiny: TinyEngine) -> None:
    """They are complete and the same, cold, warm, chunked or preempted; what they computed serves others."""
    prompt = random_ids(1, 70)
    engine = tiny(max_num_batched_tokens=512)
    engine.reset_prefix_cache()
    options = {**GREEDY, "prompt_logprobs": 2, "logprobs": 2}
    cold_output = engine.generate(prompt, **options)
    assert cold_output.usage.cached_tokens == 0
    assert cold_output.prompt_logprobs is not None
    assert len(cold_output.prompt_logprobs) == len(prompt)
    assert engine.generate(prompt, **GREEDY).usage.cached_tokens == len(prompt) - 1
    warm = engine.generate(prompt, **options)
    assert warm.usage.cached_tokens == 0
    assert warm.prompt_logprobs == cold_output.prompt_logprobs
    assert warm.logprobs == cold_output.logprobs
    chunked = tiny(max_num_batched_tokens=7).generate([prompt, random_ids(2, 9)], **options)[0]
    assert chunked.prompt_logprobs == cold_output.prompt_logprobs
    small = tiny(blocks=9, max_num_batched_tokens=50)
    longer = {**options, "max_tokens": 40}
    preempted = small.generate([random_ids(3, 30), prompt, prompt], **longer)
    assert small.stats().preemptions > 0
    assert [o.prompt_logprobs for o in preempted[1:]] == [cold_output.prompt_logprobs] * 2
    for output in preempted[1:]:
        for position, entry in enumerate(output.logprobs or []):
            assert output.token_ids[position] in entry


def test_prompt_logprobs_of_n_completions(tiny: TinyEngine) -> None:
    """With n > 1 and with a prompt of one token they are what they are for n = 1."""
    engine = tiny()
    for prompt in (random_ids(4, 20), [5]):
        single = engine.generate(prompt, prompt_logprobs=1, max_tokens=2, seed=1)
        several = engine.generate(prompt, prompt_logprobs=1, max_tokens=2, seed=1, n=3)
        assert several.prompt_logprobs == single.prompt_logprobs
        assert len(several.prompt_logprobs or []) == len(prompt)


def test_prompt_logprobs_of_a_prompt_preempted_half_way(tiny: TinyEngine) -> None:
    """A prompt that loses its blocks before all of it was computed reports each position once."""
    prompt = random_ids(12, 70)
    options = {**GREEDY, "prompt_logprobs": 1}
    expected = tiny(max_num_batched_tokens=512).generate(prompt, **options)
    engine = tiny(blocks=8, max_num_batched_tokens=3)
    grower = SamplingParams(**{**GREEDY, "max_tokens": 60})
    _, output = engine.generate([random_ids(13, 30), prompt], [grower, SamplingParams(**options)])
    assert output.usage.num_preemptions > 0
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.token_ids == expected.token_ids


def test_prompt_logprobs_between_plain_requests(tiny: TinyEngine) -> None:
    """In steps that many requests share, each gets its own rows of logits."""
    prompts = [random_ids(21 + i, length) for i, length in enumerate((33, 70, 5, 18, 1, 40))]
    options = [{**GREEDY, "prompt_logprobs": 1} if i % 2 else GREEDY for i in range(len(prompts))]
    engine = tiny(max_num_batched_tokens=512)
    alone = [engine.generate(prompt, **each) for prompt, each in zip(prompts, options, strict=True)]
    for budget in (512, 40, 7):
        engine = tiny(max_num_batched_tokens=budget)
        engine.reset_prefix_cache()
        together = engine.generate(prompts, [SamplingParams(**each) for each in options])
        for found, expected in zip(together, alone, strict=True):
            assert found.token_ids == expected.token_ids
            assert found.prompt_logprobs == expected.prompt_logprobs


def test_a_prompt_counts_once_however_many_completions_wait(tiny: TinyEngine) -> None:
    """Completions that find no seat and start later are not counted as further prompts."""
    engine = tiny(max_num_seqs=2)
    engine.reset_prefix_cache()
    before = engine.stats()
    engine.generate(random_ids(14, 40), n=6, **GREEDY)
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 40
    assert after.tokens_reused - before.tokens_reused == 0


def test_a_stopped_warm_up_leaves_later_output_unchanged(tiny: TinyEngine) -> None:
    """A warm-up that ended inside a stop string was cut in the text, not in the cache."""
    engine = tiny()
    prompt = random_ids(6, 40)
    expected = cold(engine, [prompt], **GREEDY)
    engine.reset_prefix_cache()
    with saying(engine, b"one two END three"):
        warm_up = engine.generate(prompt, stop=["END"], max_tokens=16)
    assert (warm_up.text, warm_up.stop_reason) == ("one two ", "END")
    assert_same_bits(generate_recorded(engine, [prompt], **GREEDY), expected)
    continued = [*prompt, *b"one two END", *random_ids(7, 5)]
    before = engine.stats().tokens_reused
    warm = generate_recorded(engine, [continued], **GREEDY)
    assert engine.stats().tokens_reused - before == len(prompt) + len(b"one two END") - 1
    assert_same_bits(warm, cold(engine, [continued], **GREEDY))


def test_cached_tokens_are_those_of_the_first_start(tiny: TinyEngine) -> None:
    """Usage and hit rate count what was there when the request first ran, not when it was submitted."""
    engine = tiny(max_num_seqs=1)
    engine.reset_prefix_cache()
    before = engine.stats()
    prompt = random_ids(8, 48)
    first, second = engine.generate([prompt, prompt], **GREEDY)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 47)
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 96
    assert after.tokens_reused - before.tokens_reused == 47


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral with a window of 24 tokens."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from support import TINY_VOCAB, save_byte_tokenizer

    directory = tmp_path_factory.mktemp("windowed")
    config = MistralConfig(
        vocab_size=TINY_VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, sliding_window=24, initializer_range=0.15,
        bos_token_id=TINY_BOS, eos_token_id=257,
    )  # fmt: skip
    torch.manual_seed(3)
    MistralForCausalLM(config).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sliding_windows_and_the_cache(windowed: Path, shared_engines: TinyEngine, dtype: str) -> None:
    """With a sliding window: warm, copied, chunked and preempted runs give the cold bits."""
    prompts = [random_ids(seed, length) for seed, length in enumerate((10, 23, 24, 25, 60, 130, 200))]
    engine = shared_engines(str(windowed), dtype=dtype, kv_cache_memory="2MiB", max_num_batched_tokens=512)
    options = {**GREEDY, "max_tokens": 30}
    expected = cold(engine, prompts, **options)
    engine.reset_prefix_cache()
    for _ in range(2):
        assert_same_bits(generate_recorded(engine, prompts, **options), expected)
    cut = [*prompts[6][:75], *random_ids(9, 40)]
    expected_cut = cold(engine, [cut], **options)
    engine.reset_prefix_cache()
    engine.generate(prompts, **options)
    before = engine.stats().tokens_reused
    assert_same_bits(generate_recorded(engine, [cut], **options), expected_cut)
    assert engine.stats().tokens_reused - before == 75
    width = 2 if dtype == "bfloat16" else 4
    small = shared_engines(
        str(windowed), dtype=dtype, kv_cache_memory=16 * 16 * 3 * 2 * 2 * 16 * width, max_num_batched_tokens=33
    )
    assert_same_bits(generate_recorded(small, prompts, **options), expected)
    assert small.stats().preemptions > 0


def test_a_preempted_request_streams_on_without_a_break(tiny: TinyEngine) -> None:
    """Text, tokens and log-probabilities of a preempted stream are those of an undisturbed one."""
    small, roomy = tiny(blocks=14), tiny()
    prompts = [random_ids(seed, 20) for seed in range(5)]
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 3, "logprobs": 1}
    expected = [roomy.generate(prompt, **options) for prompt in prompts]
    streams = [small.stream(prompt, **options) for prompt in prompts]
    chunks = [[next(stream)] for stream in streams]
    for stream, mine in zip(streams, chunks, strict=True):
        mine.extend(stream)
    outputs = small.generate(prompts, **options)
    assert sum(output.usage.num_preemptions for output in outputs) > 0
    for wanted, mine, output in zip(expected, chunks, outputs, strict=True):
        assert [t for chunk in mine for t in chunk.token_ids] == wanted.token_ids == output.token_ids
        assert "".join(chunk.text for chunk in mine) == wanted.text == output.text
        assert output.logprobs == wanted.logprobs
    assert_idle(small)


def test_a_prompt_that_just_fits_runs_beside_others(tiny: TinyEngine) -> None:
    """Prompts that each nearly fill the pool take turns; they do not preempt each other for ever."""
    engine = tiny(blocks=6, max_num_batched_tokens=40)
    prompts = [random_ids(seed, 80) for seed in range(4)]
    before = engine.stats()
    outputs = engine.generate(prompts, **{**GREEDY, "max_tokens": 17})
    assert [len(output.token_ids) for output in outputs] == [17] * 4
    after = engine.stats()
    assert after.steps - before.steps <= 4 * (80 // 40 + 17) + 4 * (after.preemptions - before.preemptions) + 4
    assert after.preemptions - before.preemptions <= 4


def test_seeded_requests_ignore_their_neighbours(tiny: TinyEngine) -> None:
    """A seeded request gives the same tokens alone, in a batch, behind others, and on another engine."""
    prompt = random_ids(10, 12)
    seeded: dict[str, Any] = {"seed": 42, "max_tokens": 20, "ignore_eos": True, "n": 3}
    alone = [c.token_ids for c in tiny().generate(prompt, **seeded).outputs]
    assert len({tuple(ids) for ids in alone}) == 3, "the children share a seed"
    engine = tiny(max_num_seqs=5)
    neighbours = [random_ids(seed, 5 + seed) for seed in range(6)]
    engine.generate(neighbours, max_tokens=3)
    for position in (0, 3, 6):
        batch = [*neighbours[:position], prompt, *neighbours[position:]]
        mixed = engine.generate(batch, **seeded)[position]
        assert [c.token_ids for c in mixed.outputs] == alone


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them(new_tiny: TinyEngine) -> None:
    """Without a seed the same prompt varies; with ``Engine(seed=...)`` the sequence of requests repeats."""
    runs = []
    for seed in (7, 7, 8, None):
        engine = new_tiny(seed=seed)
        runs.append([engine.generate([1, 2], max_tokens=12, ignore_eos=True).token_ids for _ in range(4)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2] != runs[3]
    assert len({tuple(ids) for ids in runs[0]}) == 4


def test_streams_never_show_part_of_a_stop_string_or_character(tiny: TinyEngine) -> None:
    """Through the whole engine: the earliest stop wins, nothing leaks, no character is split."""
    engine = tiny()
    said = "Grüße 東京 <|end|> und mehr"
    with saying(engine, said.encode()):
        chunks = list(engine.stream([1, 2], stop=["mehr", "<|end|>", "|en"], max_tokens=30))
        assert "".join(chunk.text for chunk in chunks) == "Grüße 東京 <"
        assert chunks[-1].stop_reason == "|en"
        output = engine.generate([1, 2], stop=["<|end|>"], max_tokens=len(said.encode()))
        assert (output.text, output.finish_reason, output.stop_reason) == ("Grüße 東京 ", "stop", "<|end|>")
        cut = engine.generate([1, 2], max_tokens=3)
        assert cut.text == "Gr"
        shown = [chunk.text for chunk in engine.stream([1, 2], max_tokens=20)]
        assert not any("\ufffd" in text for text in shown)


def test_a_prompt_that_ends_inside_a_character_leaks_nothing(tiny: TinyEngine) -> None:
    """The first half of a character in the prompt, its second half generated: one whole character."""
    engine = tiny()
    whole = "東".encode()
    with saying(engine, whole[1:] + b"!"):
        assert engine.generate([*b"ab", whole[0]], max_tokens=3).text == "東!"
    with saying(engine, b"xyz"):
        assert engine.generate([*b"ab", whole[0]], max_tokens=3).text == "xyz"


def test_exactly_one_beginning_of_sequence(tiny: TinyEngine) -> None:
    """Through plain text, through text that carries it already, and through the chat template."""
    engine = tiny()
    messages = [{"role": "user", "content": "hi"}]
    for ids in (
        engine.generate("hi", max_tokens=1).prompt_token_ids,
        engine.generate("<bos>hi", max_tokens=1).prompt_token_ids,
        engine.chat(messages, max_tokens=1).prompt_token_ids,
    ):
        assert Counter(ids)[TINY_BOS] == 1
        assert ids[0] == TINY_BOS
    assert engine.generate([104, 105], max_tokens=1).prompt_token_ids == [104, 105], "ids are taken as they are"


def test_a_batch_with_one_cold_prefix_computes_it_once(tiny: TinyEngine) -> None:
    """Sixteen requests submitted together share a prefix that is in no cache: it is computed once."""
    engine = tiny(max_num_batched_tokens=64)
    shared = random_ids(11, 160)
    prompts = [[*shared, *random_ids(100 + number, 4)] for number in range(16)]
    expected = cold(tiny(max_num_batched_tokens=512), prompts, **GREEDY)
    engine.reset_prefix_cache()
    before = engine.stats()
    assert_same_bits(generate_recorded(engine, prompts, **GREEDY), expected)
    after = engine.stats()
    assert after.tokens_prefilled - before.tokens_prefilled == 160 + 16 * 4
    assert after.tokens_reused - before.tokens_reused == 15 * 160


def test_pressure_never_empties_the_cache(tiny: TinyEngine) -> None:
    """One request more than fits evicts what it needs and no more."""
    engine = tiny(blocks=20, max_num_seqs=1)
    engine.reset_prefix_cache()
    for seed in range(8):
        engine.generate(random_ids(seed, 60), **{**GREEDY, "max_tokens": 1})
        stats = assert_idle(engine)
        assert stats.blocks_cached >= min(20, 4 * (seed + 1)) - 4


def test_abort_in_every_state_restores_the_baseline(new_tiny: TinyEngine) -> None:
    """Aborted while queued, half prefilled, decoding, preempted, forked or done: all blocks are back."""
    engine = new_tiny(blocks=12, max_num_seqs=4, max_num_batched_tokens=8)
    core = engine._loop.core
    states: Counter[str] = Counter()

    def drive() -> None:
        for steps in range(0, 40, 2):
            options = {"n": 2, "max_tokens": 30, "ignore_eos": True}
            batch = engine._client.prepare([random_ids(seed, 30) for seed in range(5)], None, options)
            requests = [engine._client._request(prepared) for prepared in batch]
            live = [RequestState(r, engine._client.tokenizer, lambda _: None, stream=False) for r in requests]
            core.add(live)
            for _ in range(3 * steps):
                if core.has_work:
                    core.step()
            for sequence in [*core.scheduler.running, *core.scheduler.waiting]:
                phase = "decoding" if sequence.is_decoding else "started" if sequence.num_computed else "fresh"
                states[f"{sequence.status.name} {phase} {sequence.num_preemptions > 0}"] += 1
            for request in requests:
                core.cancel([request.request_id, request.request_id])
                core.check_integrity()
            assert not core.has_work
            assert core.scheduler.cache.allocator.num_held == 0
            core.scheduler.cache.reset()
            assert core.scheduler.cache.allocator.num_free == 12

    engine._loop.call(drive)
    assert {"WAITING fresh False", "WAITING fresh True", "RUNNING started False", "RUNNING decoding False"} <= set(
        states
    )
