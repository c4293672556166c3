"""The fuzzer finds what it is for: each of these defects, put into an engine, is reported within a few epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.kv.disk import files
from foreword.kv.store import DiskStore

from . import disk, driver, life, operations, options
from .driver import Failure, World, fuzz, make_plan, shrink
from .life import stores

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
    """Engines compute when operations say so: a defect is found at the same place every time."""
    monkeypatch.setattr(driver, "MODES", ("stepped",))
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


def test_a_lost_release(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that failed forgets to give its blocks back. Where that leaves a request waiting, it is soon given up;
    elsewhere patience stays long, as on a loaded machine a request that is well may wait for seconds."""
    monkeypatch.setattr(life, "PATIENCE_S", 1.0)

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


def test_a_block_that_was_not_computed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed commits what it was to compute."""
    monkeypatch.setattr(operations, "PARTS", ("forward",))

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
    assert any(part in reason for part in ("were reused, but only", "explain says", "the explanation says"))


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


# -- pins, explanations, conversations -----------------------------------------------------------------------------


def test_a_pin_that_holds_nothing(world: World) -> None:
    """What is pinned is evicted like everything else."""

    def spoil(_: Any, core: Any) -> None:
        cache = core.scheduler.cache
        original = cache.pins.add

        def add(key: Any, pin: Any) -> None:
            original(key, pin)
            cache.allocator.release(pin.blocks)

        cache.pins.add = add

    reason = find(world, spoil).reason
    assert "tokens are pinned" in reason or "a pin holds nothing" in reason or "AssertionError" in reason


def test_pins_without_a_cap(world: World) -> None:
    def spoil(_: Any, core: Any) -> None:
        core.scheduler.cache.pins.check_room = lambda *_: None

    assert "are more than" in find(world, spoil).reason


def test_a_pin_that_is_not_counted(world: World) -> None:
    """A prefix that is pinned twice is let go of with the first unpin."""

    def spoil(_: Any, core: Any) -> None:
        cache = core.scheduler.cache
        cache.pins.lower = lambda key: cache._drop_pin(key)

    reason = find(world, spoil).reason
    assert "pins on" in reason or "was not there" in reason


def test_an_explanation_that_is_one_token_off(world: World) -> None:
    def spoil(_: Any, core: Any) -> None:
        original = core.scheduler.cache.explain

        def explain(namespace: bytes, tokens: list[int]) -> Any:
            evidence = original(namespace, tokens)
            shorter = evidence.stop._replace(num_tokens=max(evidence.stop.num_tokens - 1, 0))
            return evidence._replace(stop=shorter)

        core.scheduler.cache.explain = explain

    reason = find(world, spoil).reason
    assert "matched, says its explanation" in reason or "cached, says explain" in reason


def test_an_answer_put_back_without_its_last_token(world: World) -> None:
    def spoil(engine: Any, _: Any) -> None:
        turns = engine._client.conversations.turns
        original = turns.remember

        def remember(salt: Any, index: int, message: Any, turn: Any) -> None:
            original(salt, index, message, replace(turn, token_ids=turn.token_ids[:-1]))

        turns.remember = remember

    assert "its prompt says" in find(world, spoil).reason


# -- the disk ------------------------------------------------------------------------------------------------------


def spoil_store(name: str, make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """Replace the disk store's ``name`` by ``make(store, original)``."""

    def spoil(_: Any, core: Any) -> None:
        for each in stores(core):
            if isinstance(each, DiskStore):
                setattr(each, name, make(each, getattr(each, name)))

    return spoil


@pytest.fixture
def disk_world(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Every epoch keeps its KV on a disk without faults, large enough and often asked: no tier is before it, and the
    pool holds little."""
    monkeypatch.setattr(driver, "DIRECTORIES", ("own",))
    for name, values in {"kv_tokens": (48, 64, 96), "swap_tokens": (0,), "disk_blocks": (60, 400)}.items():
        monkeypatch.setitem(options.OPTIONS, name, values)
    return world


def test_a_wrong_number_behind_the_checksum(disk_world: World) -> None:
    """A restored block differs from what was read in one number."""

    def make(store: Any, original: Any) -> Any:
        def load(tier: Any, ref: Any, block: int) -> bool:
            if original(tier, ref, block):
                store._pool.block(block)[-1, 0, 0, 0, 0] += 1
                return True
            return False

        return load

    assert "alone" in find(disk_world, spoil_store("_load", make)).reason


def test_a_load_one_token_too_long(disk_world: World) -> None:
    """The store shows, and says it brought, one token more than it has."""

    def peek(_: Any, original: Any) -> Any:
        def one_more(namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
            found = original(namespace, tokens, start, limit)
            return min(found + 1, limit - start) if found else 0

        return one_more

    def load(_: Any, original: Any) -> Any:
        def one_more(namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Any) -> Any:
            transfer = original(namespace, tokens, start, limit, blocks)

            def run(stop: Any) -> int:
                loaded = transfer.run(stop)
                return min(loaded + 1, limit - start) if loaded else 0

            return transfer._replace(run=run)

        return one_more

    def spoil(life: Any, core: Any) -> None:
        spoil_store("peek", peek)(life, core)
        spoil_store("load", load)(life, core)

    reason = find(disk_world, spoil).reason
    assert "alone" in reason or "were reused, but only" in reason


def test_a_salt_that_the_disk_forgets(disk_world: World) -> None:
    def make(_store: Any, original: Any) -> Any:
        return lambda _: original(bytes(32))

    reason = find(disk_world, spoil_store("_tier", make)).reason
    assert "were reused, but only" in reason or "were ever asked" in reason


def test_a_part_filled_block_with_a_slot_too_few(disk_world: World) -> None:
    """The last slot of a part-filled block goes to disk as it was before."""

    def make(_: Any, original: Any) -> Any:
        return lambda block, num_tokens: original(block, num_tokens - 1)

    assert "alone" in find(disk_world, spoil_store("_read_part", make)).reason


def test_blocks_saved_before_they_are_copied(disk_world: World) -> None:
    """A sequence that leaves before its copy on write is carried out goes to disk all the same."""

    def spoil(_: Any, core: Any) -> None:
        cache = core.scheduler.cache
        cache._copies_into = lambda _: []

    reason = find(disk_world, spoil).reason
    assert "alone" in reason or "left behind" in reason or "AssertionError" in reason


@pytest.mark.soak
def test_damage_that_nobody_looks_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are not compared."""
    monkeypatch.setattr(driver, "DIRECTORIES", ("own, faulty",))
    monkeypatch.setattr(disk, "DAMAGE", ("flipped",))

    def read(self: Any, place: Any, into: memoryview) -> None:
        with open(self.folder / place.segment.name, "rb") as file:
            file.seek(place.segment.offset + place.number * self.geometry.block_bytes)
            file.readinto(into)

    monkeypatch.setattr(files.SegmentFiles, "read", read)
    assert "alone" in find(world, lambda *_: None).reason


def test_a_report_can_be_run_again_and_made_small(world: World) -> None:
    """A failure names seed and epoch; with most operations left out it fails in the same way; repaired, all holds."""
    failure = find(world, no_copies)
    assert f"--seed {SEED} --epoch {failure.plan.epoch}" in str(failure)
    with pytest.raises(Failure) as again:
        world.run_again(make_plan(SEED, failure.plan.epoch))
    assert str(again.value) == str(failure)
    small = shrink(world, failure, 20.0)
    assert len(small.plan.operations) <= 10 < len(failure.plan.operations)
    assert "alone" in small.reason
    world.spoil = lambda _: None
    world.run(make_plan(SEED, failure.plan.epoch))
