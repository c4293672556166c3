"""Bad input is refused before any work, with a message that names what is wrong."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine, EngineClosedError, EngineConfig, ModelLoadError, PromptTooLongError, SamplingParams
from support import random_ids

TinyEngine = Callable[..., Engine]
NAN, INF = math.nan, math.inf

BAD_SAMPLING: list[tuple[str, Any]] = [
    *[("max_tokens", v) for v in (0, -1, 1.5, "8", True)],
    *[("temperature", v) for v in (-0.1, NAN, INF, "hot", None, True)],
    *[("top_p", v) for v in (0, 0.0, -0.5, 1.01, NAN, None, "1")],
    *[("top_k", v) for v in (-1, 2.0, None, "5")],
    *[("min_p", v) for v in (-0.01, 1.5, NAN, None)],
    *[("repetition_penalty", v) for v in (0, -1.0, NAN, INF, None)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, None)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, None)],
    *[("stop", v) for v in ("", ["a", ""], [5], 5, [None])],
    *[("stop_token_ids", v) for v in ([-1], ["a"], [1.0], [True], 7)],
    *[("min_tokens", v) for v in (-1, 1.0, 500, None)],
    *[("logprobs", v) for v in (-1, 1.5, "2", True)],
    *[("prompt_logprobs", v) for v in (-1, 1.5, "2", True)],
    *[("seed", v) for v in (1.5, "a", 2**63, -(2**63) - 1, True)],
    *[("n", v) for v in (0, -1, 1.5, None, True)],
    *[("logit_bias", v) for v in ({1: 101}, {1: NAN}, {"1": 1.0}, {-1: 1.0}, {1: "x"}, [1, 2], 5)],
    *[("priority", v) for v in (1.5, None, "high")],
    *[("cache_priority", v) for v in (1.5, None, "high", True)],
]

BAD_OPTIONS: list[tuple[str, Any]] = [
    *[("dtype", v) for v in ("float64", "int8", 16, None)],
    *[("kv_cache_dtype", v) for v in ("int4", "bfloat16", 8, None)],
    *[("device", v) for v in ("tpu", "cuda", 5, None)],
    *[("block_size", v) for v in (0, -16, 3, 24, 256, 16.0, None, True)],
    *[("max_num_seqs", v) for v in (0, -1, 1.5, None)],
    *[("max_num_batched_tokens", v) for v in (0, -5, 2.5, "many")],
    *[("max_model_len", v) for v in (0, -1, 2.5, "long", 10**6)],
    *[("gpu_memory_utilization", v) for v in (0, -0.1, 1.1, NAN, "90%", None)],
    *[("deterministic", v) for v in (1, "yes", None)],
    *[("kv_cache_memory", v) for v in (0, -1, "", "lots", "5 parsecs", "-1MB", 1.5, True)],
    *[("seed", v) for v in (1.5, "x", True)],
    *[("scheduling_policy", v) for v in ("fastest", 5, None, object)],
    *[("eviction_policy", v) for v in ("fifo", 5, None, ["lru"])],
    *[("max_pinned_memory", v) for v in (-1, "", "lots", 1.5, True)],
    *[("cache_trace", v) for v in ("", "trace.gz", "/no/such/directory/trace")],
]


def names(pairs: list[tuple[str, Any]]) -> list[str]:
    return [f"{field}={value!r}"[:40] for field, value in pairs]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING, ids=names(BAD_SAMPLING))
def test_bad_sampling_values_name_their_field(field: str, value: Any) -> None:
    """Every sampling value out of range is a ValueError that names the field, in the class and as a keyword."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
    with pytest.raises(ValueError, match=field):
        SamplingParams.build(SamplingParams(), **{field: value})


def test_unknown_sampling_keys_are_refused(tiny: TinyEngine) -> None:
    """A misspelt option is never silently ignored, on any way in."""
    engine = tiny()
    message = [{"role": "user", "content": "hi"}]
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate("a", max_new_tokens=3),
        lambda: engine.stream("a", max_new_tokens=3),
        lambda: engine.chat(message, max_new_tokens=3),
        lambda: engine.stream_chat(message, max_new_tokens=3),
        lambda: asyncio.run(anext(engine.astream("a", max_new_tokens=3))),
        lambda: asyncio.run(anext(engine.astream_chat(message, max_new_tokens=3))),
        lambda: asyncio.run(engine.agenerate("a", max_new_tokens=3)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"max_new_tokens.*max_tokens"):
            call()


@pytest.mark.parametrize(("field", "value"), BAD_OPTIONS, ids=names(BAD_OPTIONS))
def test_bad_engine_options_name_their_field(tiny_dir: Path, field: str, value: Any) -> None:
    """Every engine option out of range is a ValueError that names it, and no engine is left running."""
    with pytest.raises(ValueError, match=field):
        Engine(str(tiny_dir), **{"kv_cache_memory": "1MiB", "dtype": "float32", field: value})


@pytest.mark.parametrize("model", ["", "   ", None, 5])
def test_a_model_must_be_named(model: Any) -> None:
    """A missing model name is a ValueError about it."""
    with pytest.raises(ValueError, match="model"):
        EngineConfig(model=model)


def test_unknown_engine_options_are_refused(tiny_dir: Path) -> None:
    """An option that does not exist is refused by the constructor and by the shared registry."""
    with pytest.raises(TypeError, match="kv_memory"):
        Engine(str(tiny_dir), kv_memory="1MiB")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="kv_memory"):
        Engine.shared(str(tiny_dir), kv_memory="1MiB")


def test_a_pool_without_a_block_is_refused(tiny_dir: Path) -> None:
    """KV memory for less than one block is a ModelLoadError that says how much a block takes."""
    with pytest.raises(ModelLoadError, match=r"kv_cache_memory=100 .*block"):
        Engine(str(tiny_dir), dtype="float32", kv_cache_memory=100)
    with pytest.raises(ValueError, match=r"kv_cache_memory=\d+ .*hand out so much"):
        Engine(str(tiny_dir), dtype="float32", kv_cache_memory=10**17)
    with pytest.raises(ValueError, match=r"kv_cache_memory=\d+ .*hand out so much"):
        Engine(str(tiny_dir), dtype="float32", kv_cache_memory=10**30)


@contextmanager
def untouched(engine: Engine) -> Iterator[None]:
    """Nothing is queued, computed or allocated meanwhile."""
    before = engine.stats()
    yield
    assert dataclasses.asdict(engine.stats()) == dataclasses.asdict(before)


def test_prompts_longer_than_the_context(tiny: TinyEngine) -> None:
    """A prompt that leaves no room for a token is refused, naming both lengths; the longest that does runs."""
    engine = tiny(max_model_len=50)
    with untouched(engine):
        for length in (50, 51, 1000):
            with pytest.raises(PromptTooLongError, match=rf"\b{length}\b.*\b50\b"):
                engine.generate(random_ids(0, length))
    output = engine.generate(random_ids(0, 49), max_tokens=None, ignore_eos=True)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_prompts_longer_than_the_pool(tiny: TinyEngine) -> None:
    """A prompt that the KV memory cannot hold is refused at once; one that fits runs to the last slot."""
    engine = tiny(blocks=4)
    with untouched(engine), pytest.raises(PromptTooLongError, match=r"\b65\b.*\b64\b"):
        engine.generate(random_ids(0, 65))
    for length in (64, 63, 40):
        output = engine.generate(random_ids(length, length), max_tokens=None, ignore_eos=True)
        assert len(output.token_ids) == 65 - length
        assert output.finish_reason == "length"
    assert issubclass(PromptTooLongError, ValueError)


def test_one_long_prompt_does_not_harm_the_batch(tiny: TinyEngine) -> None:
    """A batch with one member too long is refused whole, before any work."""
    engine = tiny(blocks=4)
    with untouched(engine), pytest.raises(PromptTooLongError):
        engine.generate([[1, 2, 3], random_ids(0, 65)])


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [[1], []]])
def test_empty_prompts(tiny: TinyEngine, prompt: Any) -> None:
    """An empty prompt, alone or in a batch, is a ValueError that says so."""
    with untouched(tiny()), pytest.raises(ValueError, match="empty"):
        tiny().generate(prompt)


@pytest.mark.parametrize("prompt", [None, 5, 1.5, {"a": 1}, [1, "a"], ["a", 5], ["a", None], [1.5], [True], b"bytes"])
def test_prompts_of_a_wrong_type(tiny: TinyEngine, prompt: Any) -> None:
    """What is neither text nor token ids is a ValueError about the prompt."""
    with untouched(tiny()), pytest.raises(ValueError, match="prompt"):
        tiny().generate(prompt)


@pytest.mark.parametrize("token", [-1, 260, 10**9])
def test_token_ids_outside_the_vocabulary(tiny: TinyEngine, token: int) -> None:
    """Ids that the model does not have are refused in prompts, biases and stops, naming the id."""
    engine = tiny()
    with untouched(engine):
        with pytest.raises(ValueError, match=re.escape(str(token))):
            engine.generate([1, token])
        if token > 0:
            with pytest.raises(ValueError, match=str(token)):
                engine.generate("a", logit_bias={token: 1.0})
            with pytest.raises(ValueError, match=str(token)):
                engine.generate("a", stop_token_ids=[token])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        [{}],
        [{"role": "user"}],
        [{"content": "hi"}],
        ["hi"],
        "hi",
        [[]],
        [{"role": 5, "content": "a"}],
        {"role": "user", "content": "a"},
        5,
    ],
)
def test_bad_messages(tiny: TinyEngine, messages: Any) -> None:
    """An empty or malformed conversation is a ValueError that says what is missing."""
    with untouched(tiny()), pytest.raises(ValueError, match=r"message|role|content"):
        tiny().chat(messages)


def test_params_must_match_the_batch(tiny: TinyEngine) -> None:
    """A list of options needs one for each prompt."""
    engine = tiny()
    with untouched(engine), pytest.raises(ValueError, match="params"):
        engine.generate(["a", "b"], [SamplingParams()])
    with untouched(engine), pytest.raises(ValueError, match="params"):
        engine.generate("a", {"max_tokens": 3})  # type: ignore[call-overload]
    outputs = engine.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [len(output.token_ids) for output in outputs] == [1, 2]


# -- closed and forked -----------------------------------------------------------------------------------------


def every_use(engine: Engine) -> list[Callable[[], Any]]:
    message = [{"role": "user", "content": "hi"}]
    return [
        lambda: engine.generate("a"),
        lambda: engine.generate(["a", "b"]),
        lambda: engine.chat(message),
        lambda: engine.stream("a"),
        lambda: engine.stream_chat(message),
        lambda: engine.astream("a"),
        lambda: engine.explain(message),
        lambda: engine.warm(message),
        lambda: engine.pin("a"),
        lambda: engine.unpin("a"),
        engine.stats,
        engine.cache_report,
        engine.reset_prefix_cache,
        engine.check_integrity,
    ]


def test_use_after_close(new_tiny: TinyEngine) -> None:
    """Every use of a closed engine is an EngineClosedError; closing again is allowed."""
    engine = new_tiny()
    engine.generate("a", max_tokens=1)
    engine.close()
    engine.close()
    assert engine.closed
    assert "closed" in repr(engine)
    for use in every_use(engine):
        with pytest.raises(EngineClosedError, match="closed"):
            use()


async def test_use_after_close_from_asyncio(new_tiny: TinyEngine) -> None:
    """The same for coroutines."""
    engine = new_tiny()
    engine.close()
    with pytest.raises(EngineClosedError):
        await engine.agenerate("a")
    with pytest.raises(EngineClosedError):
        await engine.achat([{"role": "user", "content": "hi"}])


def test_a_stream_begun_before_close_is_told(new_tiny: TinyEngine) -> None:
    """A stream that was prepared but not begun raises, and so does one in the middle: what came is no whole answer."""
    engine = new_tiny()
    prepared, running = engine.stream("a"), engine.stream("b", max_tokens=None, ignore_eos=True)
    next(running)
    engine.close()
    with pytest.raises(EngineClosedError):
        next(prepared)
    with pytest.raises(EngineClosedError, match="closed before req-"):
        list(running)


def test_a_call_that_close_interrupts_is_told(new_tiny: TinyEngine) -> None:
    """Nobody takes half an answer for a whole one: a single call raises, the members of a batch have the error."""
    engine = new_tiny()
    endless = {"max_tokens": None, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        single = pool.submit(engine.generate, "a", **endless)
        batch = pool.submit(engine.generate, ["b", "c"], **endless)
        while engine.stats().running < 3:
            time.sleep(0.001)
        engine.close()
        with pytest.raises(EngineClosedError, match="closed before req-"):
            single.result()
        for output in batch.result():
            assert output.finish_reason == "cancelled"
            assert isinstance(output.error, EngineClosedError)


def test_use_in_a_forked_child(new_tiny: TinyEngine) -> None:
    """In a forked child every use is a clear error and close() returns; the parent's engine keeps working."""
    engine = new_tiny()
    expected = engine.generate("a", max_tokens=4, temperature=0.0).token_ids
    child = os.fork()
    if child == 0:  # no assertion may leave this branch
        code = 1
        try:
            refused = 0
            for use in every_use(engine):
                try:
                    use()
                except EngineClosedError as error:
                    refused += "fork" in str(error)
            engine.close()
            code = 0 if refused == len(every_use(engine)) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert engine.generate("a", max_tokens=4, temperature=0.0).token_ids == expected


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_not_pickled_or_copied(tiny: TinyEngine, use: Callable[[Any], Any]) -> None:
    engine = tiny()
    with pytest.raises(TypeError, match=r"an Engine cannot be pickled or copied.* give model= and options instead"):
        use(engine)
    assert not engine.closed


def test_a_path_of_the_wrong_kind_is_refused_at_once(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_dir=.*it is no directory"):
        Engine(str(tiny_dir), cache_dir=tmp_path / "file")
    with pytest.raises(ValueError, match=r"cache_trace=.*it is no file"):
        Engine(str(tiny_dir), cache_trace=tmp_path)


def test_home_is_expanded(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with Engine(str(tiny_dir), cache_dir="~/kv", kv_cache_memory="1MiB") as engine:
        engine.generate([1, 2, 3], max_tokens=1)
    assert any((tmp_path / "kv").rglob("*.kv"))


def test_a_message_shows_no_whole_prompt(tiny_dir: Path) -> None:
    with Engine(str(tiny_dir), kv_cache_memory="1MiB") as engine:
        with pytest.raises(ValueError, match=r"characters\).*use chat") as caught:
            engine.generate([{"role": "user", "content": "x" * 5000}])
        assert len(str(caught.value)) < 400
