"""The rows of a step together: each as if it were alone, errors of one alone, and one look at the device for all."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foreword import SamplingParams
from foreword.core.request import Request
from foreword.ops.cpu import CpuOps
from foreword.ops.protocol import Draw
from foreword.runtime import sampler as module
from foreword.runtime.sampler import Sampler, how_to_draw
from foreword.scheduling.sequence import Sequence

V = 50
EOS = 3
SAMPLER = Sampler(frozenset({EOS}))
OPS = CpuOps(torch.float32, 1)


@dataclass
class Grammar:
    """A constraint that allows ``allowed``, or gives up if that is None, and closes with ``closing``."""

    allowed: set[int] | None
    closing: int | None = None
    closed: list[int] = field(default_factory=list)

    def mask(self) -> bytes:
        if self.allowed is None:
            raise ValueError("the grammar gave up")
        bits = np.array([token in self.allowed or token >= V for token in range(64)])  # longer than the vocabulary
        return np.packbits(bits, bitorder="little").tobytes()

    def leaves_room(self, token_id: int, remaining: int) -> bool:
        self.closed.append(remaining)
        return self.closing is None or token_id == self.closing

    def closing_token(self) -> int:
        assert self.closing is not None
        return self.closing


def sequence(seed: int, grammar: Grammar | None = None, generated: int = 0, **options: Any) -> Sequence:
    tokens = torch.randint(0, V, (12 + generated,), generator=torch.Generator().manual_seed(seed)).tolist()
    request = Request(f"{seed}", 0, tokens[:12], SamplingParams(**options), b"", 0.0, 100, seed)
    made = Sequence(request, constraint=grammar)  # type: ignore[arg-type]
    made.token_ids += tokens[12:]
    if generated:
        made.num_samples = 1
    return made


def logits(rows: int) -> Tensor:
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(7))


def mixed() -> list[Sequence]:
    """One of each kind, and some of several."""
    return [
        sequence(1, temperature=0.0),
        sequence(2, generated=9, top_p=0.9, frequency_penalty=0.7, presence_penalty=0.1, logprobs=2),
        sequence(3, Grammar({1, EOS, 30, 49}), repetition_penalty=1.4, logit_bias={30: 2.5, 1: -1.0}),
        sequence(4, n=3, temperature=1.7, logprobs=5, min_tokens=4),
        sequence(5, Grammar({EOS, 8}), generated=4, temperature=0.0, min_tokens=9, stop_token_ids=(8,)),
        sequence(6, temperature=0.0, logprobs=0, logit_bias={9: 100.0}),
        sequence(7, Grammar(set(range(0, V, 2))), generated=2, top_k=7, min_tokens=9, logprobs=5),
    ]


def test_a_row_is_treated_as_if_it_were_alone() -> None:
    """The adjusted logits have the bits that they have alone, in any order; so have tokens and log-probabilities."""
    sequences, rows = mixed(), logits(7)
    before = rows.clone()
    alone = [SAMPLER.adjust([each], row[None])[0][0] for each, row in zip(sequences, rows, strict=True)]
    samples = [SAMPLER.sample([each], row[None], OPS) for each, row in zip(sequences, rows, strict=True)]
    for order in (list(range(7)), [6, 2, 0, 5, 4, 3, 1]):
        together, errors = SAMPLER.adjust([sequences[number] for number in order], rows[order])
        assert not errors
        assert torch.equal(together, torch.stack([alone[number] for number in order]))
        found = SAMPLER.sample([sequences[number] for number in order], rows[order], OPS)
        assert found == list(itertools.chain.from_iterable(samples[number] for number in order))
    assert torch.equal(rows, before), "the caller's logits were changed"


def test_the_completions_of_a_request_draw_from_the_same_row() -> None:
    """Each with its own number: what each of them draws alone."""
    rows = torch.zeros(2, V)
    together = SAMPLER.sample([sequence(8, temperature=0.0), sequence(9, n=20)], rows, OPS)[1:]
    alone = []
    for index in range(20):
        single = sequence(9, n=20)
        single.index, single.num_samples = index, 1
        alone += SAMPLER.sample([single], rows[:1], OPS)
    assert [(each.index, each.token_id) for each in together] == [(each.index, each.token_id) for each in alone]
    assert len({each.token_id for each in together}) > 10


def test_what_a_grammar_forbids() -> None:
    """All tokens that its mask lacks, to the last of the vocabulary; the others keep their bits."""
    rows = logits(2)
    allowed = {0, 7, 8, 31, 48}
    adjusted, _ = SAMPLER.adjust([sequence(1), sequence(2, Grammar(allowed))], rows)
    assert torch.equal(adjusted[0], rows[0])
    for token in range(V):
        assert adjusted[1, token] == (rows[1, token] if token in allowed else -torch.inf)


def test_ends_are_held_off_unless_there_is_nothing_else() -> None:
    """A grammar that is fulfilled allows an end alone, which min_tokens cannot take away; a neighbour's it does."""
    rows = torch.zeros(4, V)
    options: dict[str, Any] = {"min_tokens": 5, "stop_token_ids": (9, V + 20), "temperature": 0.0}
    sequences = [sequence(1, Grammar({EOS, 9}), **options), sequence(2, Grammar({EOS, 9, 30}), **options)]
    sequences += [sequence(3, **options), sequence(4, Grammar({EOS}), ignore_eos=True, **options)]
    adjusted, _ = SAMPLER.adjust(sequences, rows)
    assert [set((row > -torch.inf).nonzero().flatten().tolist()) for row in adjusted] == [
        {EOS, 9}, {30}, set(range(V)) - {EOS, 9}, {EOS},
    ]  # fmt: skip


def test_an_error_of_one_row_is_its_own() -> None:
    """A grammar that gives up and logits that are not finite: the others' tokens and log-probabilities stay."""
    sequences, rows = mixed(), logits(7)
    expected = SAMPLER.sample(sequences, rows, OPS)
    spoiled = torch.cat((rows[:3], logits(9)[7:], rows[3:]))
    spoiled[4, 11] = torch.nan
    failing = [sequence(20, Grammar(None), n=2, logprobs=1), sequence(21, n=2, logprobs=5, frequency_penalty=1.0)]
    found = SAMPLER.sample([*sequences[:3], *failing, *sequences[3:]], spoiled, OPS)
    assert [str(each.error) for each in found[3:7]] == ["the grammar gave up"] * 2 + [
        "the model gave logits that are not finite at position 11"
    ] * 2
    assert found[:3] + found[7:] == expected


def test_logits_that_the_temperature_takes_beyond_float32() -> None:
    """Their row has its most likely token, and the others theirs."""
    sequences, rows = mixed(), logits(7)
    expected = SAMPLER.sample(sequences, rows, OPS)
    huge = sequence(20, temperature=1e-5, top_p=0.9), sequence(21, temperature=1e-5), sequence(22, temperature=1e-5)
    found = SAMPLER.sample([*huge, *sequences], torch.cat((logits(3) * 1e35, rows)), OPS)
    assert [each.token_id for each in found[:3]] == logits(3).argmax(dim=1).tolist()
    assert found[3:] == expected


def test_any_top_k_is_a_number_of_the_device() -> None:
    """Also one beyond all floating-point numbers, in which settings go to a GPU."""
    draw = how_to_draw(sequence(1, top_k=10**400), 0)
    assert np.array(draw)[Draw._fields.index("top_k")] == 2**31 - 1


def test_a_closing_token_is_reported_as_itself() -> None:
    """Where the drawn token would not leave room, the one that closes is taken, with its own log-probabilities."""
    rows = logits(2)
    grammar = Grammar(set(range(V)), closing=44)
    closing, other = SAMPLER.sample([sequence(1, grammar, logprobs=3), sequence(2, logprobs=3)], rows, OPS)
    assert (closing.token_id, grammar.closed) == (44, [99])
    assert closing.logprobs is not None
    values = rows[0].log_softmax(0)
    assert closing.logprobs == pytest.approx({token: float(values[token]) for token in closing.logprobs})
    assert [*closing.logprobs] == [44, *values.topk(3).indices.tolist()]
    assert other.token_id in (other.logprobs or {})


class Unseen:
    """A backend whose tokens, as everything on the device, have no values."""

    def draw(self, rows: Tensor, draws: list[Draw]) -> Tensor:
        assert rows.shape == (len(draws), V)
        return torch.empty(len(draws), dtype=torch.int32, device=rows.device)


def test_the_device_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose tensors cannot be read, the step goes on to the one place where tokens and log-probabilities
    are, together."""
    reads = []

    def read_back(tensors: list[Tensor]) -> list[Tensor]:
        assert {each.device.type for each in tensors} == {"meta"}
        reads.append(len(tensors))
        return [torch.ones(each.shape, dtype=each.dtype) for each in tensors]

    monkeypatch.setattr(module, "read_back", read_back)
    samples = SAMPLER.sample(mixed(), torch.empty(7, V, device="meta"), Unseen())  # type: ignore[arg-type]
    assert reads == [1 + 4 * 3], "the tokens, and a report for each number of log-probabilities"
    assert [each.token_id for each in samples] == [1] * 9
    assert [each.logprobs is not None for each in samples] == [False, True, False, True, True, True, False, True, True]
