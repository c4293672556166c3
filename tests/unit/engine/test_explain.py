"""Where a match with the cache ends, and why: what keeps a prompt from being reused has a name and a place."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from foreword import CacheExplanation, Engine, PromptPiece

RULES = "You answer questions about the weather. Be polite, be brief, name the source. "
SYSTEM = PromptPiece("system", 0, "system")
GREEDY = {"max_tokens": 4, "temperature": 0}


@pytest.fixture
def engine(fp32_engine: Engine) -> Engine:
    """Nothing cached, and nothing remembered."""
    fp32_engine.reset_prefix_cache()
    core = fp32_engine._loop.core
    core.scheduler.cache.log = type(core.scheduler.cache.log)()
    core.explanations = type(core.explanations)()
    return fp32_engine


def chat(time: str, question: str = "Will it rain?") -> list[dict[str, Any]]:
    system = f"It is {time} now. {RULES}"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def why(explanation: CacheExplanation | None) -> tuple[Any, ...]:
    assert explanation is not None
    return explanation.reason, explanation.cause, explanation.piece


def test_volatile_text_near_the_head_is_named(engine: Engine) -> None:
    """A clock in the system prompt: the piece, the token, both texts, and what it costs."""
    first = engine.chat(chat("12:05"), **GREEDY)
    found = engine.explain(chat("12:47"))
    assert why(found) == ("diverged", "clock", SYSTEM)
    assert found.nearest == first.request_id
    assert found.position == found.matched_tokens < 20 < found.prompt_tokens
    assert found.before_text.endswith("It is 12:")
    assert found.expected_text.startswith("05 now.")
    assert found.actual_text.startswith("47 now.")
    behind = engine.count_tokens(chat("12:47")) - found.position - 2
    assert behind - 6 <= found.lost_tokens <= behind
    output = engine.chat(chat("12:47"), **GREEDY)
    assert output.prefix is not None
    assert output.usage.cached_tokens == found.matched_tokens
    assert output.prefix.to_dict() | {"lost_seconds": 0} == found.to_dict() | {"lost_seconds": 0}


def test_the_nearest_prompt_is_the_one_most_alike(engine: Engine) -> None:
    """Digits agree by chance: another program's prompt may share one more of them."""
    mine = engine.chat(chat("12:05"), **GREEDY)
    engine.chat([{"role": "system", "content": "It is 12:41 now. Translate what you are told into French."}], **GREEDY)
    found = engine.explain(chat("12:47"))
    assert (found.cause, found.nearest) == ("clock", mine.request_id)
    assert found.lost_tokens > 20


def test_a_question_that_differs_is_the_users_message(engine: Engine) -> None:
    engine.chat(chat("noon"), **GREEDY)
    found = engine.explain(chat("noon", "Is it cold?"))
    assert why(found) == ("diverged", None, PromptPiece("message", 1, "user"))
    assert found.expected_text.startswith("Will it rain?")
    assert found.lost_tokens < 10


def test_all_known_all_new_and_known_so_far(engine: Engine) -> None:
    assert why(engine.explain("Nothing is cached yet.")) == ("never_seen", None, PromptPiece("text"))
    engine.generate("One, two, three, four", max_tokens=1, ignore_eos=True)
    known = engine.explain("One, two, three, four")
    assert (known.reason, known.position, known.piece, known.lost_tokens) == ("complete", None, None, 0)
    longer = engine.explain("One, two, three, four, five, six")
    assert longer.reason == "never_seen"
    assert longer.position == engine.count_tokens("One, two, three, four")
    assert longer.actual_text == ", five, six"


def test_the_next_turn_goes_on_where_the_last_ended(engine: Engine) -> None:
    turn = engine.chat(chat("noon"), max_tokens=16, temperature=0)
    assert turn.message is not None
    more = [*chat("noon"), turn.message.as_dict(), {"role": "user", "content": "And tomorrow?"}]
    found = engine.explain(more)
    assert found.reason == "never_seen"
    assert found.matched_tokens == turn.usage.prompt_tokens + turn.usage.completion_tokens - 1
    cut = str(turn.message.content)[:-3]
    edited = [*more[:2], {"role": "assistant", "content": f"{cut}, they say"}, more[3]]
    assert why(engine.explain(edited)) == ("diverged", "history_changed", PromptPiece("message", 2, "assistant"))


def test_evicted_prompts_are_remembered(engine: Engine) -> None:
    first = engine.chat(chat("noon"), **GREEDY)
    engine.reset_prefix_cache()
    found = engine.explain(chat("noon", "Is it cold?"))
    assert why(found) == ("evicted", None, SYSTEM)
    assert found.nearest == first.request_id
    assert found.lost_tokens > 20
    assert engine.explain(chat("noon")).lost_tokens == first.usage.prompt_tokens - 1


def test_it_changes_nothing_and_keeps_salts_apart(engine: Engine) -> None:
    engine.chat(chat("noon"), **GREEDY)
    before = engine.stats()
    other = engine.explain(chat("noon"), cache_salt="other")
    assert why(other) == ("other_namespace", "namespace", SYSTEM)
    assert (other.matched_tokens, other.expected_text) == (0, "")
    assert engine.explain(chat("noon")).reason == "complete"
    assert engine.stats() == before


def test_the_same_text_in_other_tokens(engine: Engine) -> None:
    """An answer that was encoded again, because the caller builds the prompt by hand."""
    pieces = [engine.encode(piece) for piece in ("The answer is un", "believ", "able, said the keeper.")]
    by_hand = [token for piece in pieces for token in piece]
    engine.generate(by_hand, max_tokens=1)
    whole = "The answer is unbelievable, said the keeper."
    assert engine.encode(whole) != by_hand
    found = engine.explain(whole + " And then?")
    assert (found.reason, found.cause) == ("diverged", "retokenized")
    assert found.expected_text.startswith(found.actual_text[:12])


def test_tools_that_change_are_found(engine: Engine) -> None:
    engine.chat(chat("noon"), tools=[tool("rain"), tool("wind")], **GREEDY)
    assert engine.explain(chat("noon"), tools=[tool("wind"), tool("rain")]).reason == "complete"
    shuffled = engine.explain(chat("noon"), tools=[tool("wind"), tool("rain")], canonical_tools=False)
    assert shuffled.cause == "tool_order"
    renamed = engine.explain(chat("noon"), tools=[tool("rain"), tool("winds")])
    assert why(renamed) == ("diverged", None, PromptPiece("tools", 1))


def test_an_explanation_travels_and_reads_well(engine: Engine) -> None:
    engine.chat(chat("12:05"), **GREEDY)
    output = engine.chat(chat("12:47"), **GREEDY)
    assert output.prefix is not None
    again = pickle.loads(pickle.dumps(output))
    assert again.prefix == output.prefix
    assert json.loads(json.dumps(output.prefix.to_dict()))["piece"] == {"kind": "system", "index": 0, "role": "system"}
    text = str(output.prefix)
    for part in (
        "prompt tokens are cached",
        "the system prompt",
        "clock",
        "05 now.",
        "47 now.",
        "tokens computed again",
    ):
        assert part in text
    assert "\033" not in text  # standard output is no terminal here


def test_the_report_ranks_what_was_saved_and_what_was_lost(engine: Engine) -> None:
    for clock in ("12:05", "12:47", "13:01"):
        engine.chat(chat(clock), **GREEDY)
    for question in ("Is it cold?", "Is it warm?", "Is it dark?"):
        engine.chat(chat("noon", question), **GREEDY)
    report = engine.cache_report()
    assert report.requests == 6
    assert report.reused_tokens == engine_reused(engine, report.requests)
    best, worst = report.prefixes[0], report.divergences[0]
    assert (best.piece, best.requests) == (SYSTEM, 2)
    assert "noon" in best.text
    assert (worst.cause, worst.piece, worst.requests) == ("clock", SYSTEM, 2)
    assert worst.tokens_lost > 40
    assert report.lost_tokens == sum(point.tokens_lost for point in report.divergences)
    assert sum(saving.tokens_saved for saving in report.prefixes) == report.reused_tokens
    assert json.loads(json.dumps(report.to_dict()))["divergences"][0]["cause"] == "clock"
    assert "clock at token" in str(report)


def engine_reused(engine: Engine, count: int) -> int:
    return sum(each.reused_tokens for each in engine._loop.core.explanations.snapshot()[-count:])


def test_without_prefix_caching_nothing_is_explained(new_tiny: Callable[..., Engine]) -> None:
    engine = new_tiny(enable_prefix_caching=False)
    assert engine.generate("Hello there", max_tokens=2).prefix is None
    assert engine.explain("Hello there").reason == "never_seen"


def test_the_log_of_prompts_is_bounded(new_tiny: Callable[..., Engine]) -> None:
    engine = new_tiny()
    log = engine._loop.core.scheduler.cache.log
    log._max_tokens = 600
    for number in range(30):
        engine.generate(f"Prompt number {number:>20}", max_tokens=2)
    assert 1 <= len(log) <= 6
    assert log._num_tokens == sum(len(prompt.key) // 4 + 128 for prompt in log._by_age) <= 600
    assert sorted(map(id, log._sorted)) == sorted(map(id, log._by_age))


def test_wrong_input_is_refused_as_in_a_call(engine: Engine) -> None:
    calls: list[Callable[[], Any]] = [lambda: engine.explain(""), lambda: engine.explain([{"role": "x"}])]
    for call in calls:
        with pytest.raises(ValueError):  # noqa: PT011 - their messages are tested where they are raised
            call()


def test_metadata_compares_where_tokens_were_computed(engine: Engine) -> None:
    """A question that differs is told from its place; a system prompt that does, in full."""
    engine.chat(chat("12:05"), **GREEDY)
    asked = engine.chat(chat("12:05", "Is it cold?"), **GREEDY)
    found = asked.prefix_cache()
    assert asked.prefix is not None
    full = asked.prefix.to_dict()
    assert {name for name in full if found[name] != full[name]} <= {
        "piece", "expected_text", "actual_text", "before_text", "lost_tokens", "lost_seconds", "nearest",
    }  # fmt: skip
    assert (found["reason"], found["position"], found["piece"]) == ("diverged", asked.usage.cached_tokens, None)
    text = "Nothing of this was ever said before, and so all of it is computed, whatever it may be about. " * 5
    other = engine.chat([{"role": "user", "content": text}], **GREEDY)
    assert other.prefix is not None
    assert other.prefix_cache() == other.prefix.to_dict() | {"cached_tokens": other.usage.cached_tokens}
    assert other.prefix_cache()["piece"] is not None
    assert engine.chat(chat("12:05"), **GREEDY).prefix_cache()["reason"] == "complete"
    assert pickle.loads(pickle.dumps(asked)).prefix_cache() == found
