"""Errors put into the machinery: the requests concerned fail, all others live, every block comes back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foreword import Engine, RequestFailedError
from foreword.engine.request_state import RequestState
from foreword.text.assistant import AssistantParser
from foreword.text.conversation import Rendered
from foreword.text.detokenizer import IncrementalDetokenizer
from support import (
    assert_idle,
    assert_same_bits,
    cold,
    compute_paths,
    fill_with_nan,
    generate_recorded,
    kernels_under_test,
    random_ids,
)

from .injection import InjectedError, replaced

TinyEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
POISON = [7, 7, 7]


def runner(engine: Engine) -> Any:
    return engine._loop.core.runner


def is_poisoned(sequence: Any) -> bool:
    return sequence.token_ids[:3] == POISON


def failing_at(step: int) -> Callable[[Any], Any]:
    """A method that raises on its call number ``step``."""

    def make(original: Any) -> Any:
        calls = iter(range(10**9))

        def method(*args: Any) -> Any:
            if next(calls) == step:
                raise InjectedError("injected")
            return original(*args)

        return method

    return make


@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("part", ["execute", "forward", "logits"])
def test_a_failed_step_fails_its_requests_only(tiny: TinyEngine, part: str, step: int) -> None:
    """All requests of the step fail with the cause chained, the waiting ones run, later ones give the same bits."""
    engine = tiny(max_num_seqs=2)
    prompts = [random_ids(seed, 20) for seed in range(5)]
    expected = cold(engine, prompts, **GREEDY)
    engine.reset_prefix_cache()
    target = runner(engine) if part == "execute" else runner(engine).model
    with replaced(target, part, failing_at(step)):
        outputs = engine.generate(prompts, **GREEDY)
    assert [output.finish_reason for output in outputs] == ["error"] * 2 + ["length"] * 3
    for output in outputs[:2]:
        assert isinstance(output.error, RequestFailedError)
        assert isinstance(output.error.__cause__, InjectedError)
        assert output.request_id in str(output.error)
    assert [output.token_ids for output in outputs[2:]] == [ids for ids, _ in expected[2:]]
    assert_idle(engine)
    assert_same_bits(generate_recorded(engine, prompts, **GREEDY), expected)


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_a_failed_step_leaves_no_unwritten_kv(new_tiny: TinyEngine, length: int) -> None:
    """A completion that ended while its copy was still to be made, then a failed step: no later hit on the copy."""
    engine = new_tiny()
    prompt = random_ids(1, length)
    expected = cold(engine, [prompt], **GREEDY)
    first = expected[0][0][0]
    for stop in (first, None):
        engine.reset_prefix_cache()
        fill_with_nan(runner(engine).pool)
        sampling = {**GREEDY, "n": 3, "max_tokens": 1 if stop is None else 5, "stop_token_ids": [stop] if stop else []}
        with replaced(runner(engine), "execute", failing_at(1)):
            engine.generate([prompt], **sampling)
            engine.generate([random_ids(2, 5)], **GREEDY)
        assert_idle(engine)
        assert_same_bits(generate_recorded(engine, [prompt], **GREEDY), expected)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_completions_that_end_with_their_first_token(tiny: TinyEngine, n: int) -> None:
    """n completions of one token each: all arrive, the engine lives, no block is held."""
    engine = tiny()
    output = engine.generate(random_ids(n, 21), n=n, max_tokens=1, ignore_eos=True)
    assert [len(completion.token_ids) for completion in output.outputs] == [1] * n
    assert_idle(engine)


def test_a_sampler_error_fails_one_request(tiny: TinyEngine) -> None:
    """An exception while one request's token is chosen is not its neighbours' trouble."""
    engine = tiny()
    prompts = [[*POISON, 1], [1, 2, 3, 4], [5, 6]]
    expected = [ids for ids, _ in cold(engine, prompts[1:], **GREEDY)]

    def make(original: Any) -> Any:
        def settle(sequence: Any, token: int) -> int:
            if is_poisoned(sequence) and len(sequence.token_ids) > 6:
                raise InjectedError("injected")
            return original(sequence, token)

        return settle

    with replaced(runner(engine)._sampler, "settle", make):
        outputs = engine.generate(prompts, **GREEDY)
    assert outputs[0].finish_reason == "error"
    assert isinstance(outputs[0].error.__cause__, InjectedError)
    assert len(outputs[0].token_ids) == 3, "what was generated before the error is still reported"
    assert [output.token_ids for output in outputs[1:]] == expected
    assert_idle(engine)


def test_a_detokenizer_error_fails_one_request(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception while text is made fails that request; the others end as they should."""
    engine = tiny()
    calls: list[IncrementalDetokenizer] = []
    original = IncrementalDetokenizer.append

    def append(self: IncrementalDetokenizer, token_id: int) -> str:
        calls.append(self)
        if self is calls[0] and calls.count(self) > 2:
            raise InjectedError("injected")
        return original(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "append", append)
    outputs = engine.generate([[1, 2, 3], [4, 5, 6]], **GREEDY)
    assert sorted(output.finish_reason for output in outputs) == ["error", "length"]
    assert_idle(engine)


def spoiling(value: float, poisoned_only: bool) -> Any:
    """What replaces a runner's ``_sample``: logits become ``value`` before a token is chosen from them."""

    def make(original: Any) -> Any:
        def sample(sequences: list[Any], logits: torch.Tensor) -> Any:
            spoiled = [is_poisoned(sequence) or not poisoned_only for sequence in sequences]
            return original(sequences, torch.where(torch.tensor(spoiled)[:, None], value, logits))

        return sample

    return make


@pytest.mark.parametrize("logprobs", [None, 0], ids=["plain", "reported"])
@pytest.mark.parametrize("n", [1, 3])
def test_nan_logits_fail_one_request(tiny: TinyEngine, n: int, logprobs: int | None) -> None:
    """Logits that are not finite fail their request, naming the position; the neighbours' bits stay (n > 1 too)."""
    engine = tiny()
    prompts = [[*POISON, 1], [1, 2, 3, 4]]
    options = {**GREEDY, "n": n, "logprobs": logprobs}
    expected = cold(engine, prompts[1:], **options)
    engine.reset_prefix_cache()
    with replaced(runner(engine), "_sample", spoiling(torch.nan, poisoned_only=True)):
        outputs = engine.generate(prompts, **options)
        with pytest.raises(RequestFailedError, match="not finite at position 3"):
            engine.generate(prompts[0], **options)
    assert [c.finish_reason for c in outputs[0].outputs] == ["error"] * n
    assert [c.token_ids for c in outputs[1].outputs] == [ids for ids, _ in expected]
    assert_idle(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinite_logits_fail_too(tiny: TinyEngine, value: float, temperature: float) -> None:
    """A row with +inf or with nothing but -inf gives no token, greedy or drawn."""
    engine = tiny()
    with (
        replaced(runner(engine), "_sample", spoiling(value, poisoned_only=False)),
        pytest.raises(RequestFailedError, match="not finite"),
    ):
        engine.generate([1, 2], **{**GREEDY, "temperature": temperature})
    assert_idle(engine)


@pytest.mark.parametrize("path", compute_paths(kernels_under_test()))
def test_nan_in_foreign_kv_reaches_nobody(new_tiny: TinyEngine, path: dict[str, Any]) -> None:
    """A pool full of NaN, as a failed neighbour would leave it: nobody reads a slot that is not its own."""
    block_size = 4 if path["kernels"] == "torch" else 16
    engine = new_tiny(blocks=256 // block_size, block_size=block_size, **path)
    prompts = [random_ids(seed, 3 + 4 * seed) for seed in range(8)]
    expected = cold(engine, prompts, **GREEDY)
    engine.reset_prefix_cache()
    fill_with_nan(runner(engine).pool)
    assert_same_bits(generate_recorded(engine, prompts, **GREEDY), expected)
    assert_same_bits(generate_recorded(engine, prompts[::-1], **GREEDY), expected[::-1])


def test_a_nan_neighbour_in_the_batch_changes_nothing(new_tiny: TinyEngine) -> None:
    """Hidden states of one request become NaN in the forward pass: it fails, the others keep their bits."""
    engine = new_tiny()
    engine._loop.core.runner.model._embedding[250] = torch.nan
    prompts = [[250, 1, 2], random_ids(0, 30), [3, 250], random_ids(1, 17)]
    healthy = [[t for t in prompt if t != 250] for prompt in prompts[1::2]]
    expected = cold(engine, healthy, **GREEDY)
    engine.reset_prefix_cache()
    outputs = engine.generate([prompts[0], healthy[0], prompts[2], healthy[1]], **GREEDY)
    assert [o.finish_reason for o in outputs] == ["error", "length", "error", "length"]
    assert [o.token_ids for o in outputs[1::2]] == [ids for ids, _ in expected]
    assert_same_bits(generate_recorded(engine, healthy, **GREEDY), expected)
    assert_idle(engine)


def test_a_policy_that_raises_ends_nobodys_request(new_tiny: TinyEngine, caplog: Any) -> None:
    """A user's policy with a bug is logged, and the requests run in order of arrival: nobody's request ends by it."""

    class Broken:
        def key(self, _: Any) -> Any:
            raise InjectedError("a bug in the policy")

    engine = new_tiny(scheduling_policy=Broken)
    outputs = engine.generate([[1], [2]], max_tokens=1)
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    assert any("a bug in the policy" in str(record.exc_info) for record in caplog.records)
    assert engine.generate([3], max_tokens=1).finish_reason == "length"


def test_a_token_without_text_is_not_in_the_output(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails while its text is made: its pieces and its output hold the same tokens and logprobs."""
    engine = tiny()
    calls = iter(range(10**9))
    original = IncrementalDetokenizer.append

    def append(self: IncrementalDetokenizer, token_id: int) -> str:
        if next(calls) == 3:
            raise InjectedError("injected")
        return original(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "append", append)
    pieces: list[Any] = []
    ended = threading.Event()

    def consume(piece: Any) -> None:
        pieces.append(piece)
        if piece.output is not None:
            ended.set()

    engine._client.submit(engine._client.prepare([[1, 2, 3]], None, {**GREEDY, "logprobs": 0}), consume, stream=True)
    assert ended.wait(60)
    [completion] = pieces[-1].output.outputs
    assert completion.finish_reason == "error"
    assert completion.token_ids == [token for piece in pieces for token in piece.token_ids]
    assert completion.logprobs == [values for piece in pieces for values in piece.logprobs or []]
    assert len(completion.token_ids) == 3
    assert_idle(engine)


@pytest.mark.parametrize("broken", ["parser.append", "parser.message", "remember", "usage"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_our_own_output_raises_reaches_the_caller(tiny: TinyEngine, broken: str, stream: bool) -> None:
    """An error while an answer is made a message ends its request with that error; nobody waits for ever."""
    engine = tiny()
    expected = engine.generate([1, 2, 3], **GREEDY).token_ids

    def fail(*_: Any) -> Any:
        raise RecursionError("injected")

    targets: dict[str, tuple[Any, str]] = {
        "parser.append": (AssistantParser, "append"),
        "parser.message": (AssistantParser, "message"),
        "remember": (Rendered, "remember"),
        "usage": (RequestState, "_usage"),
    }
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*targets[broken], fail)
        chat = engine._client.prepare_chats([[{"role": "user", "content": "hi"}]], None, {**GREEDY, "n": 2})
        engine._client.submit(chat, heard.put, stream=stream)
        while (chunk := heard.get(timeout=30)).output is None:
            pass
    assert [c.finish_reason for c in chunk.output.outputs] == ["error", "error"]
    assert isinstance(chunk.output.error, RequestFailedError)
    assert isinstance(chunk.output.error.__cause__, RecursionError)
    assert heard.empty()
    assert engine.generate([1, 2, 3], **GREEDY).token_ids == expected
    assert_idle(engine)


def test_a_call_nested_beyond_reading_comes_back(new_tiny: TinyEngine) -> None:
    """Its arguments nest deeper than they can be read: the answer comes, and holds them as text."""
    engine = new_tiny(blocks=600, block_size=8, max_model_len=2048)
    parameters = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    options: dict[str, Any] = {"tools": [tool], "tool_choice": "f", "max_tokens": 1100, "temperature": 0}
    output = engine.chat([{"role": "user", "content": "hi"}], logit_bias={ord("["): 100}, **options)
    assert output.message is not None
    with pytest.raises(ValueError, match="nested too deeply"):
        output.message.tool_calls[0].parse()
    assert output.finish_reason == "length"
    assert_idle(engine)
