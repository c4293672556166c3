"""What the fuzzer asks: a population of requests whose prompts share beginnings and whose sampling is of every kind."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from support import TINY_EOS, TINY_VOCAB

POPULATION = 200
"""Distinct requests of a seed: few enough for references to be shared, too many for an epoch to have seen them all."""

LONGEST_BEGINNING = 64
_PROMPT_OF_A_TURN = 72  # tokens a conversation may have before nobody continues it
_LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 50, 63, 64)  # around the borders of blocks
_LETTERS = "etaoin shrdlu"
_LIKES_LETTERS = {ord(letter): 9.0 for letter in "ab"}

KINDS: dict[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "greedy, may end": {"temperature": 0.0, "logit_bias": {TINY_EOS: 6.0}},
    "greedy, logprobs": {"temperature": 0.0, "ignore_eos": True, "logprobs": 2},
    "seeded": {"temperature": 1.0, "logprobs": 0},
    "top": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "unseeded": {"temperature": 1.0, "ignore_eos": True},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "stop string": {"temperature": 1.0, "logit_bias": _LIKES_LETTERS, "stop": ("ab", "bba")},
    "stop string kept": {
        "temperature": 1.0, "logit_bias": _LIKES_LETTERS, "stop": ("aa",), "include_stop_str_in_output": True,
    },
    "stop ids": {"temperature": 1.0, "stop_token_ids": tuple(range(0, TINY_VOCAB, 3)), "min_tokens": 2},
    "min tokens": {"temperature": 1.0, "logit_bias": {TINY_EOS: 9.0}, "min_tokens": 3},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
    "regex": {"temperature": 1.0, "structured": {"regex": "[ab]{2,5}c"}},
    "choices": {"temperature": 0.0, "structured": {"choices": ["yes", "no", "perhaps"]}},
    "schema": {
        "temperature": 1.0,
        "structured": {"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
    },
}  # fmt: skip
"""Kinds of sampling by name, as options of ``SamplingParams``."""

_WEIGHTS = [{"greedy": 6.0, "unseeded": 0.4}.get(kind, 1.0) for kind in KINDS]  # greedy is quick, unseeded has no memo

UNSEEDED = ("unseeded",)
"""Kinds whose random choices the engine derives from its own seed and the number of the request."""

INVALID: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    ("", {}),
    ([], {}),
    ([1, TINY_VOCAB], {}),
    ([1, -1], {}),
    ([1, True], {}),
    ([1, "a"], {}),
    (17, {}),
    ([1, {"role": "user", "content": "a"}], {}),
    ([1] * 5000, {}),
    ([1], {"temperature": -1.0}),
    ([1], {"top_p": 0.0}),
    ([1], {"max_tokens": 0}),
    ([1], {"n": 0}),
    ([1], {"tempreature": 1.0}),
    ([1], {"min_tokens": 9, "max_tokens": 3}),
    ([1], {"logit_bias": {TINY_VOCAB: 1.0}}),
    ([1], {"cache_salt": ""}),
    ([1], {"structured": {"regex": "(("}}),
)
"""Prompts and options that are refused with a ``ValueError``."""


@dataclass(frozen=True)
class Case:
    """One request of the population.

    Attributes:
        base: the request whose prompt and output it continues, as the next turn of a conversation.
        family, length: without a base, the beginning: so many tokens of that family.
        tail: the seed of what follows the beginning, ``tail_length`` tokens of its own.
        as_text: the prompt is given as text.
        longest: tokens of its prompt, at most.
    """

    number: int
    kind: str
    max_tokens: int
    n: int
    base: Case | None
    family: int
    length: int
    tail: int
    tail_length: int
    as_text: bool
    longest: int

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of ``SamplingParams`` that decide what comes out."""
        seed = {} if self.kind in UNSEEDED else {"seed": self.number % 7}
        clamped = {"min_tokens": min(KINDS[self.kind].get("min_tokens", 0), self.max_tokens)}
        return {**KINDS[self.kind], **clamped, **seed, "max_tokens": self.max_tokens, "n": self.n}

    def own_prompt(self) -> list[int] | str:
        """Of a case without a base."""
        if self.as_text:
            letters = random.Random(f"text {self.family}").choices(_LETTERS, k=LONGEST_BEGINNING)
            return "".join(letters[: self.length]) + "".join(
                random.Random(self.tail).choices("abü", k=self.tail_length)
            )
        return beginning(self.family)[: self.length] + self.own_tail()

    def own_tail(self) -> list[int]:
        """The tokens that follow the beginning, or the base's output."""
        return random.Random(self.tail).choices(range(256), k=self.tail_length)

    def __str__(self) -> str:
        head = f"case {self.base.number}'s output" if self.base else f"{self.length} of family {self.family}"
        text = " as text" if self.as_text else ""
        return (
            f"case {self.number} ({head} + {self.tail_length} of tail {self.tail}{text}; {self.kind}, "
            f"max_tokens={self.max_tokens}, n={self.n})"
        )


@lru_cache
def beginning(family: int) -> list[int]:
    """The tokens of a family; every family but the first parts from the one before, inside a block or at its end."""
    own = random.Random(f"family {family}").choices(range(256), k=LONGEST_BEGINNING)
    shared = (0, 11, 16, 30, 0, 48)[family]
    return (beginning(family - 1)[:shared] if shared else []) + own[shared:]


class Population:
    """The requests of one seed, by number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._cases: dict[int, Case] = {}

    def draw(self, rng: random.Random) -> Case:
        """One of them; some are asked again and again, most hardly ever."""
        return self.case(int(POPULATION * rng.random() ** 2))

    def case(self, number: int) -> Case:
        """Always the same for the same number."""
        if number not in self._cases:
            self._cases[number] = self._make(number)
        return self._cases[number]

    def _make(self, number: int) -> Case:
        rng = random.Random(f"{self.seed}/case/{number}")
        base = None
        if number and rng.random() < 0.25:
            base = self.case(rng.randrange(number))
            if base.longest + base.max_tokens > _PROMPT_OF_A_TURN or base.kind in UNSEEDED:
                base = None
        as_text = base is None and rng.random() < 0.2
        length, tail_length = rng.choice(_LENGTHS), rng.choice((0, 0, 1, 1, 3, 8, 12))
        if base is not None:
            tail_length = max(1, tail_length)
        kind, max_tokens = rng.choices(list(KINDS), _WEIGHTS)[0], rng.choice((1, 1, 1, 1, 2, 2, 2, 3, 3, 5))
        n = rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 2, 3))
        if base is None and rng.random() < 0.1:  # completions that soon need a block each: they do not fit together
            length, max_tokens, n = rng.choice((9, 12, 15, 31)), rng.randint(6, 18), rng.choice((2, 3))
        return Case(
            number=number,
            kind=kind,
            max_tokens=max_tokens,
            n=n,
            base=base,
            family=rng.randrange(6),
            length=length,
            tail=rng.randrange(12),
            tail_length=tail_length,
            as_text=as_text,
            longest=2 * tail_length + (1 + length if base is None else base.longest + base.max_tokens),
        )
