"""Warming, pinning, forking and cache points: what callers do with the cache besides filling it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from foreword import Engine, RequestOutput, SamplingParams, Warmed
from support import TINY_BOS, TINY_EOS, assert_idle, cold, generate_recorded, random_ids, tiny_token_bytes

NewTiny = Callable[..., Engine]
RULES = "You know all about lighthouses. " * 4
SYSTEM = {"role": "system", "content": RULES}
BLOCK_BYTES = 16 * tiny_token_bytes()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def part(text: str, **control: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"} | control}


def flood(engine: Engine) -> None:
    """More new prompts than the pool holds."""
    for seed in range(engine.stats().blocks_total // 20 + 1):
        engine.generate(random_ids(100 + seed, 320), max_tokens=1)


# -- warm ----------------------------------------------------------------------------------------------------------


def test_a_warm_beginning_is_computed_once(new_tiny: NewTiny) -> None:
    engine = new_tiny()
    ids = random_ids(1, 50)
    assert engine.warm(ids) == Warmed(50, 0)
    assert engine.warm(ids) == Warmed(50, 49)
    assert engine.generate([*ids, 1], max_tokens=1).usage.cached_tokens == 50
    assert engine.stats().blocks_pinned == 0
    assert_idle(engine)


def test_of_messages_the_beginning_of_every_continuation_is_warm(new_tiny: NewTiny) -> None:
    """Behind a system prompt and an answer that is the start of the user's turn; behind a question nothing is."""
    engine = new_tiny()
    warmed = engine.warm([SYSTEM])
    assert warmed == Warmed(2 + len(RULES) + 1, 0)
    for question in ("Why?", "How?"):
        assert engine.chat([SYSTEM, user(question)], max_tokens=1).usage.cached_tokens >= warmed.prompt_tokens
    asked = engine.warm([SYSTEM, user("When?")])
    assert asked.prompt_tokens == engine.count_tokens([SYSTEM, user("When?")]) - 1
    turns = [SYSTEM, user("Who?"), {"role": "assistant", "content": "Nobody."}]
    assert engine.warm(turns).prompt_tokens == engine.count_tokens(turns)  # one token for the next turn, none for ours


def test_warm_takes_what_shapes_the_prompt(new_tiny: NewTiny) -> None:
    """The salt is another cache; tools are part of the prompt; sampling does not matter."""
    engine = new_tiny()
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    engine.warm([SYSTEM], tools=[tool], cache_salt="a", params=SamplingParams(temperature=0.3, n=3, max_tokens=99))
    tokens = engine.warm([SYSTEM], tools=[tool], cache_salt="a").prompt_tokens
    assert tokens > engine.count_tokens([SYSTEM]) + len(str(tool)) - 20
    for salt, expected in (("a", tokens), ("b", 0)):
        output = engine.chat([SYSTEM, user("Why?")], tools=[tool], cache_salt=salt, max_tokens=1)
        assert output.usage.cached_tokens == expected
    assert engine.stats().tokens_generated == 4


def test_warm_for_asyncio(new_tiny: NewTiny) -> None:
    engine = new_tiny()
    ids = random_ids(1, 50)
    assert asyncio.run(engine.awarm(ids, pin=True, ttl="1h")) == Warmed(50, 0, 50)
    assert engine.unpin(ids)


# -- pin -----------------------------------------------------------------------------------------------------------


def test_what_is_pinned_stays(new_tiny: NewTiny) -> None:
    engine = new_tiny(blocks=64, eviction_policy="lru")
    ids, other = random_ids(1, 100), random_ids(2, 100)
    assert engine.warm(ids, pin=True) == Warmed(100, 0, 100)
    engine.warm(other)
    assert engine.stats().blocks_pinned == 7
    flood(engine)
    assert engine.warm(ids).cached_tokens == 99
    assert engine.warm(other).cached_tokens < 99
    assert engine.unpin(ids)
    assert not engine.unpin(ids)
    flood(engine)
    assert engine.warm(ids).cached_tokens < 99
    assert_idle(engine)


def test_only_what_is_cached_can_be_pinned(new_tiny: NewTiny) -> None:
    engine = new_tiny()
    assert engine.pin(random_ids(1, 40)) == 0
    engine.warm(random_ids(1, 40))
    assert engine.pin(random_ids(1, 60)) == 40
    assert engine.pin(random_ids(1, 40), cache_salt="another") == 0
    engine.warm([SYSTEM])
    assert engine.pin([SYSTEM]) == 2 + len(RULES) + 1
    assert engine.unpin([SYSTEM])


def test_a_reset_leaves_what_is_pinned(new_tiny: NewTiny) -> None:
    engine = new_tiny()
    ids = random_ids(1, 48)
    engine.warm(ids, pin=True)
    engine.warm(random_ids(2, 48))
    assert engine.reset_prefix_cache() == 3
    assert (engine.stats().blocks_cached, engine.stats().blocks_pinned) == (3, 3)
    assert engine.warm(ids).cached_tokens == 47
    engine.unpin(ids)
    assert engine.reset_prefix_cache() == 3
    assert_idle(engine)


def test_a_pins_time_passes(new_tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds or as text; nobody has to run for it to be over."""
    engine = new_tiny()
    now, ids = [1000.0], random_ids(1, 48)
    monkeypatch.setattr("foreword.engine.core.time.monotonic", lambda: now[0])
    engine.warm(ids)
    for ttl, seconds in ((20, 20.0), ("5m", 300.0), ("1h", 3600.0), (0.5, 0.5), ("1.5h", 5400.0)):
        engine.pin(ids, ttl=ttl)
        now[0] += 0.99 * seconds
        assert engine.stats().blocks_pinned == 3
        now[0] += 0.02 * seconds
        assert engine.stats().blocks_pinned == 0
    engine.pin(ids, ttl=1)
    now[0] += 1
    assert not engine.unpin(ids)
    engine.pin(ids, ttl=1)
    now[0] += 1
    assert engine.reset_prefix_cache() == 3


@pytest.mark.parametrize("ttl", [0, -1, "5", "5 parsecs", "m", float("inf"), float("nan"), True, [5], ""])
def test_a_wrong_time_is_named(new_tiny: NewTiny, ttl: Any) -> None:
    engine = new_tiny()
    with pytest.raises(ValueError, match=r"^ttl=.*number of seconds, or text such as"):
        engine.pin([1, 2, 3], ttl=ttl)


def test_the_cap_names_bytes_and_the_option(new_tiny: NewTiny) -> None:
    engine = new_tiny(max_pinned_memory=4 * BLOCK_BYTES)
    engine.warm(random_ids(1, 48), pin=True)
    refused = (
        rf"max_pinned_memory allows {4 * BLOCK_BYTES:,} bytes of pinned KV, {3 * BLOCK_BYTES:,} bytes are pinned, and "
        rf"this prefix needs {2 * BLOCK_BYTES:,} bytes more: unpin another prefix, or raise max_pinned_memory"
    )
    with pytest.raises(ValueError, match=refused):
        engine.warm(random_ids(2, 32), pin=True)
    assert engine.warm(random_ids(2, 32)).cached_tokens == 31
    assert engine.stats().blocks_pinned == 3


def test_wrong_arguments_are_named(new_tiny: NewTiny) -> None:
    engine = new_tiny()
    with pytest.raises(ValueError, match=r"ttl='5m' is not valid: it is the time of a pin"):
        engine.warm("Hello", ttl="5m")
    with pytest.raises(ValueError, match=r"pin='yes' is not valid: give True or False"):
        engine.warm("Hello", pin="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tools=.* a text shows no tools"):
        engine.pin("Hello", [{}])
    with pytest.raises(ValueError, match="unknown sampling parameter 'template_options'"):
        engine.pin("Hello", template_options={})
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.warm("")
    with pytest.raises(ValueError, match=r"messages\[0\] has no role"):
        engine.warm([{"content": "Hello"}])
    with pytest.raises(ValueError, match="enable_prefix_caching=False: this engine keeps nothing"):
        new_tiny(enable_prefix_caching=False).warm("Hello")


# -- fork ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_fork_reuses_all_but_one_token(new_tiny: NewTiny, salt: str | None) -> None:
    """Each of its continuations, whatever salt the answer had; and they are what they would be cold."""
    engine = new_tiny()
    first = engine.generate(random_ids(3, 37), max_tokens=21, ignore_eos=True, seed=5, cache_salt=salt)
    branches = engine.fork(first, 3, max_tokens=8, ignore_eos=True, seed=11)
    assert len({tuple(branch.token_ids) for branch in branches}) == 3
    for branch in branches:
        assert branch.prompt_token_ids == first.prompt_token_ids + first.token_ids
        assert branch.usage.cached_tokens == 37 + 21 - 1
    again = engine.fork(first, 3, max_tokens=8, ignore_eos=True, seed=11)
    assert [each.token_ids for each in again] == [each.token_ids for each in branches]
    other = engine.fork(first, 1, max_tokens=8, ignore_eos=True, cache_salt="another")
    assert other[0].usage.cached_tokens == 0
    greedy = engine.fork(first, 1, max_tokens=8, ignore_eos=True, temperature=0)[0]
    engine.reset_prefix_cache()
    assert engine.generate(greedy.prompt_token_ids, max_tokens=8, ignore_eos=True, temperature=0).token_ids == (
        greedy.token_ids
    )
    assert_idle(engine)


def test_a_fork_goes_on_before_the_end_token(new_tiny: NewTiny) -> None:
    engine = new_tiny()
    first = engine.generate(random_ids(3, 37), max_tokens=21, logit_bias={TINY_EOS: 100.0}, min_tokens=9)
    assert first.token_ids[-1] == TINY_EOS
    (branch,) = asyncio.run(engine.afork(first, 1, max_tokens=4, ignore_eos=True))
    assert branch.prompt_token_ids == first.prompt_token_ids + first.token_ids[:-1]
    assert branch.usage.cached_tokens == len(branch.prompt_token_ids) - 1


def test_wrong_forks_are_named(new_tiny: NewTiny) -> None:
    engine = new_tiny()
    output = engine.generate("Hello", max_tokens=2)
    for n in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=r"n=.* is not valid: give an integer of at least 1"):
            engine.fork(output, n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"params\.n=2 is not valid"):
        engine.fork(output, 2, SamplingParams(n=2))
    with pytest.raises(ValueError, match="output='Hello' is not valid"):
        engine.fork("Hello", 2)  # type: ignore[arg-type]


def test_an_output_does_not_show_its_salt(new_tiny: NewTiny) -> None:
    output: RequestOutput = new_tiny().generate("Hello", max_tokens=1, cache_salt="secret")
    assert output.cache_salt == "secret"
    assert "secret" not in repr(output)


# -- cache points --------------------------------------------------------------------------------------------------


def test_a_cache_point_pins_up_to_its_place(new_tiny: NewTiny) -> None:
    """In the middle of a message or at its end; the prompt is the same as without."""
    engine = new_tiny(blocks=64, eviction_policy="lru")
    marked = [{"role": "system", "content": [part(RULES), {"type": "text", "text": "Be brief. " * 8}]}, user("Why?")]
    plain = [{"role": "system", "content": RULES + "Be brief. " * 8}, user("Why?")]
    output = engine.chat(marked, max_tokens=1)
    assert output.prompt_token_ids == engine.chat(plain, max_tokens=1).prompt_token_ids
    assert engine.stats().blocks_pinned == -(-(2 + len(RULES)) // 16)
    flood(engine)
    cached = engine.explain(plain).matched_tokens
    assert 2 + len(RULES) <= cached < 2 + len(RULES) + 16
    engine.check_integrity()


def test_each_use_prolongs_a_cache_point(new_tiny: NewTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_tiny()
    now = [1000.0]
    monkeypatch.setattr("foreword.engine.core.time.monotonic", lambda: now[0])
    for question in ("Why? Tell me all.", "How? Tell me all.", "Who? Tell me all."):
        now[0] += 299.0
        engine.chat([{"role": "system", "content": [part(RULES)]}, user(question)], max_tokens=1)
        assert engine.stats().blocks_pinned == 9
    now[0] += 299.0
    assert engine.stats().blocks_pinned == 9
    now[0] += 2.0
    assert engine.stats().blocks_pinned == 0
    engine.chat([{"role": "system", "content": [part(RULES, ttl="1h")]}, user("Why? Tell me all.")], max_tokens=1)
    now[0] += 3599.0
    assert engine.stats().blocks_pinned == 9
    assert not engine.unpin([SYSTEM])
    now[0] += 2.0
    assert engine.stats().blocks_pinned == 0


def test_every_way_to_chat_reads_cache_points(new_tiny: NewTiny) -> None:
    async def achat(engine: Engine, messages: Any) -> None:
        await engine.achat(messages, max_tokens=1)

    async def astream(engine: Engine, messages: Any) -> None:
        async for _ in engine.astream_chat(messages, max_tokens=1):
            pass

    messages = [{"role": "system", "content": [part(RULES)]}, user("Why? Tell me all.")]
    ways: list[Callable[[Engine], Any]] = [
        lambda engine: list(engine.stream_chat(messages, max_tokens=1)),
        lambda engine: engine.chat([messages, messages], max_tokens=1),
        lambda engine: asyncio.run(achat(engine, messages)),
        lambda engine: asyncio.run(astream(engine, messages)),
    ]
    for way in ways:
        engine = new_tiny()
        way(engine)
        assert engine.stats().blocks_pinned == 9


def test_a_cache_point_that_passes_the_cap_is_told_once(new_tiny: NewTiny, caplog: pytest.LogCaptureFixture) -> None:
    """And fails no request."""
    engine = new_tiny(max_pinned_memory=2 * BLOCK_BYTES)
    with caplog.at_level(logging.WARNING, logger="foreword"):
        for question in ("Why?", "How?"):
            output = engine.chat([{"role": "system", "content": [part(RULES)]}, user(question)], max_tokens=1)
            assert output.finish_reason == "length"
    (record,) = [each for each in caplog.records if "cache point" in each.message]
    assert f"max_pinned_memory allows {2 * BLOCK_BYTES:,} bytes" in record.message
    assert engine.stats().blocks_pinned == 0


@pytest.mark.parametrize(
    "control", ["ephemeral", {}, {"type": "persistent"}, {"type": "ephemeral", "ttl": "2h"},
                {"type": "ephemeral", "ttl": 300}, {"type": "ephemeral", "scope": "all"}],
)  # fmt: skip
def test_a_wrong_cache_control_is_named(new_tiny: NewTiny, control: Any) -> None:
    engine = new_tiny()
    parts = ["Hello. ", {"type": "text", "text": "Why?", "cache_control": control}]
    with pytest.raises(ValueError, match=r"^messages\[1\].content\[1\].cache_control=.* is not valid: give"):
        engine.chat([SYSTEM, user(parts)], max_tokens=1)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}, "cache_control": control}
    with pytest.raises(ValueError, match=r"^tools\[0\].cache_control=.* is not valid: give"):
        engine.chat([user("Why?")], tools=[tool], max_tokens=1)


def test_the_result_is_the_same_with_a_cache_point(new_tiny: NewTiny) -> None:
    """What is pinned holds the bits that were computed."""
    engine = new_tiny(blocks=64, eviction_policy="lru")
    ids = [TINY_BOS, *random_ids(4, 90)]
    expected = cold(engine, [ids], max_tokens=4, temperature=0, ignore_eos=True)
    engine.warm(ids[:70], pin=True)
    flood(engine)
    [(tokens, logits)] = generate_recorded(engine, [ids], max_tokens=4, temperature=0, ignore_eos=True)
    assert tokens == expected[0][0]
    assert logits.equal(expected[0][1])
