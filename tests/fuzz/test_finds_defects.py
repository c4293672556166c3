"""The fuzzer finds what it is for: each of these defects, put into an engine, is reported within a few epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from . import driver, life
from .driver import Failure, World, fuzz, make_plan, shrink

SEED = 5
MOST = 2500
"""Operations within which a defect must have been found."""


@pytest.fixture(scope="module")
def whole_world(tiny_dir: Path) -> Iterator[World]:
    world = World(tiny_dir)
    yield world
    world.close()


@pytest.fixture
def world(whole_world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Engines compute when operations say so: a defect is found at the same place every time. Hangs end soon."""
    monkeypatch.setattr(driver, "MODES", ("stepped",))
    monkeypatch.setattr(life, "PATIENCE_S", 1.0)
    yield whole_world
    whole_world.spoil = lambda _: None


def find(world: World, spoil: Callable[[Any, Any], None]) -> Failure:
    """The first failure with every engine spoiled by ``spoil(engine, core)``."""
    world.spoil = lambda engine: spoil(engine, engine._loop.core)
    summary = fuzz(world, SEED, MOST)
    assert summary.failures, "the defect was not found"
    return summary.failures[0]


def no_copies(_: Any, core: Any) -> None:
    core.scheduler.cache.take_copies = lambda: []


def test_a_lost_release(world: World) -> None:
    """A sequence that failed forgets to give its blocks back."""

    def spoil(_: Any, core: Any) -> None:
        core.scheduler.cache.discard = lambda held: held.blocks.clear()

    reason = find(world, spoil).reason
    assert "left behind when idle" in reason or "hangs" in reason


def test_a_match_one_token_too_long(world: World) -> None:
    """Where a match ends inside a block, one token more is taken for cached."""

    def spoil(_: Any, core: Any) -> None:
        original = core.scheduler.cache.lookup

        def lookup(namespace: bytes, tokens: list[int], limit: int) -> Any:
            found = original(namespace, tokens, limit)
            return found._replace(num_tokens=min(found.num_tokens + (found.tail_block is not None), limit))

        core.scheduler.cache.lookup = lookup

    reason = find(world, spoil).reason
    assert "were reused, but only" in reason or "alone" in reason


def test_a_sample_that_depends_on_the_place_in_the_batch(world: World) -> None:
    """Rows behind the first are one bit off."""

    def spoil(_: Any, core: Any) -> None:
        original = core.runner._sample

        def sample(sequences: list[Any], logits: torch.Tensor) -> Any:
            return original(sequences, torch.cat([logits[:1], torch.nextafter(logits[1:], torch.tensor(9.0))]))

        core.runner._sample = sample

    assert "alone" in find(world, spoil).reason


def test_a_block_that_was_not_computed(world: World) -> None:
    """A step that failed commits what it was to compute."""

    def spoil(_: Any, core: Any) -> None:
        scheduler = core.scheduler
        original = scheduler.fail

        def fail(plan: Any) -> Any:
            scheduler.advance(plan)
            return original(plan)

        scheduler.fail = fail

    assert "alone" in find(world, spoil).reason


def test_a_cancelled_request_that_keeps_its_sequence(world: World) -> None:
    """Whoever leaves is told nothing more, but the request is computed to its end."""

    def spoil(_: Any, core: Any) -> None:
        original = core.cancel

        def cancel(ids: list[str], *, quietly: bool = False) -> None:
            for request_id in ids if quietly else ():
                if request_id in core._requests:
                    core._requests[request_id].detach()
            if not quietly:
                original(ids)

        core.cancel = cancel

    assert "was cancelled and lives on" in find(world, spoil).reason


def test_a_salt_that_is_forgotten(world: World) -> None:
    """Requests of one salt find the blocks of another."""

    def spoil(engine: Any, _: Any) -> None:
        engine._client._namespace_key = lambda _: b"the same for all"

    reason = find(world, spoil).reason
    assert "salt" in reason
    assert "were reused, but only" in reason or "explain says" in reason


def test_a_preempted_sequence_that_samples_again(world: World) -> None:
    """What was sampled last before a preemption is forgotten."""

    def spoil(_: Any, core: Any) -> None:
        original = core.scheduler._preempt

        def preempt(sequence: Any) -> None:
            original(sequence)
            if len(sequence.token_ids) > sequence.num_prompt:
                sequence.token_ids.pop()

        core.scheduler._preempt = preempt

    assert "alone" in find(world, spoil).reason


def test_a_copy_that_is_not_carried_out(world: World) -> None:
    """Copies on write are forgotten: a sequence reads a block that holds something else."""
    assert "alone" in find(world, no_copies).reason


def test_a_prefix_that_is_not_reused(world: World) -> None:
    """Nothing is wrong, but the cache serves nobody."""

    def spoil(_: Any, core: Any) -> None:
        core.scheduler.cache.release = lambda held, *_: core.scheduler.cache.discard(held)

    assert "cached tokens, not" in find(world, spoil).reason


def test_an_error_that_ends_a_neighbour(world: World) -> None:
    """A step that fails takes along who only waits."""

    def spoil(_: Any, core: Any) -> None:
        original = core.scheduler.fail

        def fail(plan: Any) -> Any:
            waiting = list(core.scheduler.waiting)
            for sequence in waiting:
                core.scheduler.finish(sequence)
            return original(plan) + waiting

        core.scheduler.fail = fail

    assert "which nobody injected into its step" in find(world, spoil).reason


def test_a_report_can_be_run_again_and_made_small(world: World) -> None:
    """A failure names seed and epoch; with most operations left out it fails in the same way; repaired, all holds."""
    failure = find(world, no_copies)
    assert f"--seed {SEED} --epoch {failure.plan.epoch}" in str(failure)
    with pytest.raises(Failure) as again:
        world.run(make_plan(SEED, failure.plan.epoch))
    assert str(again.value) == str(failure)
    small = shrink(world, failure, 20.0)
    assert len(small.plan.operations) <= 10 < len(failure.plan.operations)
    assert "alone" in small.reason
    world.spoil = lambda _: None
    world.run(make_plan(SEED, failure.plan.epoch))
