"""The benchmark's workloads, over anything that completes token ids: :class:`Driver`.

Prompts are random words of one token each, drawn from a seed: two engines that are given the same seed get the same
ids. Output is greedy, ignores the end of sequence, and its length is checked. Only the standard library is used here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

Ids = list[int]
MIN_WORDS = 256
_WORD = re.compile(r" [a-z]{2,}")


class Disturbed(RuntimeError):
    """Something else took so much of the machine that the run says nothing."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt came to.

    Attributes:
        cached_tokens: prompt tokens whose KV was reused; None if the engine does not say.
        error: why the request failed; None if it did not.
    """

    token_ids: Ids
    cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The outputs of prompts submitted together, and the seconds until the last of them was there."""

    seconds: float
    outputs: list[Output]


class Driver(Protocol):
    """An engine as the workloads see it."""

    def generate(self, prompts: list[Ids], max_tokens: int) -> Reply:
        """Complete all prompts at once with exactly ``max_tokens`` tokens each, greedily."""

    def reset(self) -> None:
        """Forget cached KV, if the engine can; prompts are new in every run all the same."""


@dataclass(slots=True)
class Session:
    """One run of one workload: draws its words, and counts what is measured.

    Attributes:
        seconds: of every measured call, in order.
        errors: requests that failed or gave another number of tokens than asked for.
        cached_tokens: reused prompt tokens of the measured calls; None once an engine did not say.
    """

    driver: Driver
    word_ids: Sequence[int]
    seed: str
    seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    errors: int = 0
    cached_tokens: int | None = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def words(self, count: int) -> Ids:
        """``count`` new random words."""
        return self._random.choices(self.word_ids, k=count)

    def prepare(self, prompts: list[Ids], max_tokens: int) -> Reply:
        """A call that is not part of the result."""
        return self.driver.generate(prompts, max_tokens)

    def measure(self, prompts: list[Ids], max_tokens: int) -> Reply:
        """A call that is."""
        reply = self.driver.generate(prompts, max_tokens)
        self.seconds.append(reply.seconds)
        self.prompt_tokens += sum(map(len, prompts))
        self.output_tokens += sum(len(output.token_ids) for output in reply.outputs)
        right = sum(output.error is None and len(output.token_ids) == max_tokens for output in reply.outputs)
        self.errors += len(prompts) - right
        for output in reply.outputs:
            if output.cached_tokens is None or self.cached_tokens is None:
                self.cached_tokens = None
            else:
                self.cached_tokens += output.cached_tokens
        return reply


@dataclass(frozen=True, slots=True)
class Workload:
    """A piece of work with one number as its result.

    Attributes:
        unit: of the result: "s" where less is better, "tok/s" where more is.
        longest: tokens of its longest sequence, prompt and output.
        measure: does the work and returns the result.
    """

    name: str
    title: str
    unit: str
    longest: int
    measure: Callable[[Session], float]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one run, in the workload's unit, and what :class:`Session` counted on the way."""

    value: float
    seconds: list[float]
    prompt_tokens: int
    output_tokens: int
    errors: int
    cached_tokens: int | None


def run(workload: Workload, driver: Driver, word_ids: Sequence[int], seed: str) -> Result:
    """Run ``workload`` once. The words depend on ``seed`` and the workload alone.

    Raises:
        Disturbed: the machine was too busy for a result.
    """
    driver.reset()
    session = Session(driver, word_ids, f"{seed}/{workload.name}")
    value = workload.measure(session)
    counts = (session.prompt_tokens, session.output_tokens, session.errors, session.cached_tokens)
    return Result(value, session.seconds, *counts)


def warm_up(driver: Driver, word_ids: Sequence[int]) -> None:
    """Let an engine allocate and compile: one long prompt, and a batch."""
    session = Session(driver, word_ids, "warm-up")
    session.prepare([session.words(1024)], 8)
    session.prepare([session.words(64) for _ in range(16)], 8)


def words_of(encode: Callable[[str], Ids], text_of: Callable[[int], str], vocab_size: int) -> Ids:
    """The ids that stand for one whole word with a space before it, so that as text they give the same tokens.

    A vocabulary that has fewer than ``MIN_WORDS`` such words gives all its ids that have a text.
    """
    texts = {token: text_of(token) for token in range(vocab_size)}
    start = encode("")  # a model's beginning-of-sequence token, if it has one
    words = [token for token, text in texts.items() if _WORD.fullmatch(text) and encode(text) == [*start, token]]
    return words if len(words) >= MIN_WORDS else [token for token, text in texts.items() if text]


# -- what is measured --------------------------------------------------------------------------------------------


def cold_prompt(session: Session, prompt: int) -> float:
    """Seconds to the first token of a new prompt."""
    return session.measure([session.words(prompt)], 1).seconds


def warm_prompt(session: Session, cached: int, new: int) -> float:
    """Seconds to the first token of a prompt whose beginning is in the cache."""
    prefix = session.words(cached)
    session.prepare([prefix + session.words(8)], 1)
    return session.measure([prefix + session.words(new)], 1).seconds


def decode(session: Session, context: int, tokens: int) -> float:
    """Tokens per second of one sequence; what comes before the first token is taken off.

    It is measured on the same prompt, which is in the cache both times: the difference of two cold prefills would drown
    the decoding in their noise.
    """
    prompt = session.words(context)
    session.prepare([prompt], 1)
    first_s = session.prepare([prompt], 1).seconds
    decode_s = session.measure([prompt], tokens + 1).seconds - first_s
    if decode_s <= 0:
        raise Disturbed(f"{tokens + 1} tokens came no later than one; something else disturbed the run")
    return tokens / decode_s


def batch(session: Session, requests: int, shared: int, own: int, tokens: int, cached: bool = False) -> float:
    """Output tokens per second of requests submitted at once, prefill included.

    Args:
        shared: prompt tokens that all requests begin with; in the cache before, if ``cached``.
        own: prompt tokens of each request alone.
        tokens: output tokens of each.
    """
    prefix = session.words(shared)
    if cached:
        session.prepare([prefix + session.words(8)], 1)
    prompts = [prefix + session.words(own) for _ in range(requests)]
    return requests * tokens / session.measure(prompts, tokens).seconds


def agent(session: Session, system: int, turns: int, new: int, tokens: int) -> float:
    """Seconds of a conversation: each turn's prompt is all that was said before, and ``new`` tokens."""
    history, total_s = session.words(system), 0.0
    for _ in range(turns):
        history = history + session.words(new)
        reply = session.measure([history], tokens)
        total_s += reply.seconds
        said = reply.outputs[0].token_ids
        history = history + (said if len(said) == tokens else session.words(tokens))
    return total_s


def rotation(session: Session, prompts: int, shared: int, rounds: int, own: int, tokens: int) -> float:
    """Seconds of ``rounds`` rounds over several system prompts, one request at a time."""
    systems, total_s = [session.words(shared) for _ in range(prompts)], 0.0
    for _ in range(rounds):
        for system in systems:
            total_s += session.measure([system + session.words(own)], tokens).seconds
    return total_s


def _shared(name: str, requests: int, shared: int, title: str = "") -> Workload:
    """The main workload at other sizes: ``requests`` at once, ``shared`` tokens in common, 32 own, 64 out."""
    title = title or f"{requests} requests at once, {shared:,} shared + 32 own, 64 out"
    measure = partial(batch, requests=requests, shared=shared, own=32, tokens=64)
    return Workload(name, title, "tok/s", shared + 32 + 64, measure)


_ALL = (
    Workload("W1", "cold first token, prompt of 1,024", "s", 1025, partial(cold_prompt, prompt=1024)),
    Workload("W2", "first token, 1,024 cached + 32 new", "s", 1057, partial(warm_prompt, cached=1024, new=32)),
    Workload("W3", "decode, one sequence behind 64 tokens", "tok/s", 193, partial(decode, context=64, tokens=128)),
    Workload("W3L", "decode, one sequence behind 2,048", "tok/s", 2177, partial(decode, context=2048, tokens=128)),
    _shared("W4", 16, 1024),
    Workload(
        "W4w",
        "the same, the shared 1,024 cached",
        "tok/s",
        1120,
        partial(batch, requests=16, shared=1024, own=32, tokens=64, cached=True),
    ),
    Workload(
        "W5",
        "agent loop: 1,024, 8 turns of 64 in, 32 out",
        "s",
        1792,
        partial(agent, system=1024, turns=8, new=64, tokens=32),
    ),
    Workload(
        "W6",
        "8 system prompts of 512, 3 rounds, 16 own, 8 out",
        "s",
        536,
        partial(rotation, prompts=8, shared=512, rounds=3, own=16, tokens=8),
    ),
    Workload(
        "W7",
        "100 requests at once, 256 in, 64 out",
        "tok/s",
        320,
        partial(batch, requests=100, shared=0, own=256, tokens=64),
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
"""The workloads by name."""

GROWTH = {
    workload.name: workload
    for workload in (
        *(_shared(f"W4r{requests}", requests, 1024) for requests in (1, 4, 16, 64)),
        *(_shared(f"W4p{shared}", 16, shared) for shared in (512, 1024, 2048, 4096, 7936)),
    )
}
"""W4 with more requests, and with longer shared beginnings: up to what the default model's 8,192 positions hold."""


def choose(names: str | None, growth: bool = False) -> list[Workload]:
    """The workloads of a comma-separated list; None takes all of W1 to W7. ``growth`` adds those of the growth.

    Raises:
        ValueError: there is no workload of that name.
    """
    known = WORKLOADS | GROWTH
    asked = list(WORKLOADS) if names is None else list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in asked:
        if name not in known:
            raise ValueError(f"there is no workload {name!r}; known are {', '.join(known)}")
    asked += [name for name in GROWTH if growth and name not in asked]
    return [known[name] for name in asked]
