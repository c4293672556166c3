"""One engine from its start to its close, and what must hold in between and at the end."""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
import traceback
import weakref
from typing import Any
from unittest.mock import patch

from foreword import Engine, EngineClosedError, EngineStats, PromptTooLongError, SamplingParams
from foreword.core.outputs import OutputChunk
from foreword.engine import storage
from foreword.engine.core import EngineCore
from foreword.text.conversation import ChatOptions
from support import inline_lanes

from .cases import UNSEEDED, Case
from .chats import Turn
from .claims import Claims, faults_of_report
from .disk import Kept
from .faults import Faults, InjectedError, wrap
from .options import Path, engine_options
from .pins import Pins
from .reference import Reference
from .submission import FINISHED, Submission, Violation

PATIENCE_S = 60.0
"""What takes longer is reported as a hang."""

PROBES = 2
_GROWING = (
    "prompt_tokens",
    "tokens_reused",
    "tokens_restored",
    "tokens_prefilled",
    "tokens_generated",
    "preemptions",
    "evictions",
    "steps",
)


class SteppedCore(EngineCore):
    """A core whose steps are taken by the fuzzer's operations, on the engine thread, until it is set free."""

    free = False

    @property
    def has_work(self) -> bool:
        return self.free and super().has_work


def stores(core: EngineCore) -> list[Any]:
    """The tiers of an engine."""
    found = [tier._store for home in core.scheduler.homes for tier in home._tiers]
    return [store for number, store in enumerate(found) if store not in found[:number]]


def _flushed(store: Any, original: Any) -> Any:
    """``save`` that is on disk as soon as it has run."""

    def save(*args: Any) -> Any:
        transfer = original(*args)
        if transfer is None:
            return None

        def run(stop: threading.Event) -> int:
            copied: int = transfer.run(stop)
            store.flush()
            return copied

        return transfer._replace(run=run)

    return save


class Life:
    """An engine with everything that was asked of it.

    Args:
        chosen: what :func:`options.draw_options` drew.
        stepped: the engine computes only in :meth:`step`, so that the same operations give the same run.
        kept: the directory of its disk tier; None without one.
    """

    def __init__(
        self, model: str, path: Path, chosen: dict[str, Any], reference: Reference, *, stepped: bool,
        kept: Kept | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.chosen = chosen
        self.stepped = stepped
        self.reference = reference
        self.kept = kept
        self.submissions: list[Submission] = []
        self.violations: list[str] = []
        self.closing = self.stuck = False
        self.respelled = self._probed = 0
        self.lock = threading.Lock()
        self._threads = set(threading.enumerate())
        with patch.object(storage, "has_own_memory", lambda _: chosen["own_memory"]):
            self.engine = Engine(model, **engine_options(chosen, kept and kept.directory))
        self.core = weakref.ref(self.engine._loop.core)
        self.faults = Faults(self.engine)
        self.pins = Pins(self.engine, chosen["pinned_home"])
        self.claims = Claims(self)
        self._turns: dict[int, Submission] = {}  # by the identity of their first message
        wrap(self.engine._client, "_check", self._around_check)
        if kept is not None:
            kept.lives.append(self)
        self._last = self.engine.stats()
        self._most_tokens: int = self.engine._loop.core.scheduler.capacity
        if stepped:
            self.engine._loop.call(self._keep_at_once)
            self.engine._loop.call(self._take_over)

    # -- submit ------------------------------------------------------------------------------------------------

    def enter(self, label: str, case: Case | Turn, salt: str | None, raises_at: int | None = None) -> Submission | None:
        """Enter a request in the ledger, before it is handed over; None, checked, if its prompt cannot fit."""
        prompt = self.prompt(case, salt)
        room = self.room(prompt)
        if room < 1:
            self._must_refuse(case, prompt, salt)
            return None
        with self.lock:
            submission = Submission(
                label, case, salt, prompt, min(case.max_tokens, room), len(self.submissions), raises_at
            )
            self.submissions.append(submission)
        if isinstance(case, Turn):
            self._turns[id(case.messages[0])] = submission
        return submission

    def prompt(self, case: Case | Turn, salt: str | None) -> list[int]:
        """The tokens of its prompt; of a conversation, in what the engine remembers of its own turns."""
        if isinstance(case, Case):
            return self.reference.prompt(self.path, case)
        options, _ = ChatOptions.split(case.options)
        return self.engine._client.conversations.render(
            case.messages, options, SamplingParams(cache_salt=salt)
        ).token_ids

    def _around_check(self, original: Any) -> Any:
        """A conversation's prompt is what it was rendered to, when it was."""

        def check(ids: list[int], params: Any, chat: Any = None) -> Any:
            submission = self._turns.get(id(chat.given[0])) if chat is not None else None
            if submission is not None:
                submission.prompt = ids
                submission.limit = min(submission.case.max_tokens, self.room(ids))
            return original(ids, params, chat)

        return check

    def strike(self, submissions: list[Submission]) -> None:
        """They were never handed over."""
        for submission in submissions:
            submission.leave()
            submission.done.set()

    def room(self, prompt: list[int]) -> int:
        """Tokens that can be generated behind ``prompt``."""
        return min(self.engine.max_model_len, self._most_tokens + 1) - len(prompt)

    def params(self, submission: Submission, priority: int = 0) -> SamplingParams:
        """How its tokens are chosen."""
        return SamplingParams(**submission.case.sampling, cache_salt=submission.salt, priority=priority)

    def given(self, submission: Submission) -> list[int] | str:
        """Its prompt as a caller gives it: text, where that is what the case has."""
        case = submission.case
        own = isinstance(case, Case) and case.as_text and case.base is None
        return case.own_prompt() if own and isinstance(case, Case) else submission.prompt

    def prepare(self, submissions: list[Submission], priority: int) -> list[Any]:
        """Requests, all of one kind, ready to be handed over."""
        client, cases = self.engine._client, [one.case for one in submissions]
        params = [self.params(one, priority) for one in submissions]
        if isinstance(cases[0], Turn):
            return client.prepare_chats([cases[0].messages], params, cases[0].options)
        return client.prepare([self.given(one) for one in submissions], params, {})

    def submit(self, submissions: list[Submission], priority: int) -> bool:
        """Hand requests over together, without waiting for anything. False if an injected error was in the way."""
        client = self.engine._client
        try:
            batch = self.prepare(submissions, priority)
        except InjectedError:
            self.strike(submissions)
            return False
        by_id: dict[str, Submission] = {}
        known = threading.Lock()

        def put(chunk: OutputChunk) -> None:
            with known:  # the engine may be quicker than the thread that submits
                submission = by_id[chunk.request_id]
            submission.take(chunk, len(self.submissions))

        with known:
            requests = client.submit(batch, put, stream=True)
            for submission, request in zip(submissions, requests, strict=True):
                submission.request_id = request.request_id
                submission.streams = submission.posted = True
                by_id[request.request_id] = submission
        return True

    def cancel(self, submission: Submission, *, quietly: bool) -> None:
        """End a request; ``quietly`` only where nobody waits for it."""
        if submission.request_id is None:
            return
        ids, loop = [submission.request_id], self.engine._loop
        submission.left = True
        submission.quiet |= quietly
        loop.post(lambda: loop.core.cancel(ids, quietly=quietly))
        self.check_gone(submission)

    def check_gone(self, submission: Submission) -> None:
        """Whoever was left or cancelled is not computed any more."""
        loop, request_id = self.engine._loop, submission.request_id
        if loop.call(lambda: request_id in loop.core._requests):
            raise Violation(f"request {submission.label} was cancelled and lives on")

    # -- watch -------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        self.engine._loop.core.__class__ = SteppedCore

    def step(self, count: int) -> None:
        """Take up to ``count`` steps, of a stepped engine."""
        core = self.engine._loop.core

        def steps() -> None:
            for _ in range(count):
                if core.scheduler.has_work:
                    core.step()

        self.engine._loop.call(steps)

    def flush(self) -> None:
        """Wait for the tiers."""

        self.engine.save()

    def _keep_at_once(self) -> None:
        """Tiers are never behind, so that they hold the same the next time."""
        for home in self.engine._loop.core.scheduler.homes:
            home._lanes = inline_lanes()
        for store in stores(self.engine._loop.core):
            wrap(store, "save", functools.partial(_flushed, store))

    @property
    def directory(self) -> Kept:
        """Of an engine that has one."""
        assert self.kept is not None
        return self.kept

    @property
    def may_lose_files(self) -> bool:
        """Whether files may go between two looks at the disk, or appear."""
        return self.kept is not None and (self.kept.damaged or not self.stepped)

    def set_free(self) -> None:
        """From here on a stepped engine computes by itself."""
        core: Any = self.engine._loop.core
        self.engine._loop.call(lambda: setattr(core, "free", True))

    def check_stats(self) -> EngineStats:
        """What holds at any moment."""
        stats = self.engine.stats()
        if stats.blocks_free + stats.blocks_held + stats.blocks_cached != stats.blocks_total:
            raise Violation(f"free + held + cached != total: {stats}")
        if stats.running > self.chosen["max_num_seqs"]:
            raise Violation(f"more run than max_num_seqs={self.chosen['max_num_seqs']}: {stats}")
        if min(stats.running, stats.waiting, stats.blocks_free, stats.blocks_held, stats.blocks_cached) < 0:
            raise Violation(f"a negative count: {stats}")
        with self.lock:
            last = self._last
            shrunk = [name for name in _GROWING if getattr(stats, name) < getattr(last, name)]
            if shrunk and not self._raced(last):
                raise Violation(f"{', '.join(shrunk)} shrank: {last}, then {stats}")
            self._last = stats
        return stats

    def _raced(self, last: EngineStats) -> bool:
        """Whether another thread's later snapshot was noted first."""
        return self.engine.stats().steps >= last.steps and not self.stepped

    def check_report(self, case: Case, salt: str | None) -> None:
        """What ``explain`` says is no more than what was asked of the engine."""
        prompt = self.reference.prompt(self.path, case)
        if self.room(prompt) < 1:
            return
        found = self.engine.explain(prompt, cache_salt=salt)
        longest = self.claims.longest(prompt, salt, len(self.submissions))
        for fault in self.claims.faults_of_explanation(found, len(prompt), longest):
            raise Violation(f"{case}, salt {salt}: {fault}")

    def check_cache_report(self) -> None:
        """The cache report is over no more than was asked."""
        report = self.engine.cache_report()
        for fault in faults_of_report(report, len(self.submissions) + self._probed):
            raise Violation(fault)

    # -- end ---------------------------------------------------------------------------------------------------

    def drain(self, rng: random.Random) -> None:
        """Wait for all that runs, check every outcome, then that nothing is left, then that the cache serves."""
        if self.stepped:
            self.set_free()
        self.wait()
        self.check_idle()
        self.faults.disarm()
        self.check_outcomes()
        self.pins.check()
        self.pins.release()
        for _ in range(PROBES if self.chosen["enable_prefix_caching"] else 0):
            self._probe(rng)
        self.check_idle()

    def wait(self) -> None:
        """Until every request has ended."""
        for submission in self.submissions:
            if not submission.quiet and not submission.done.wait(PATIENCE_S):
                raise Violation(f"request {submission.label} ({submission.case}) hangs")

    def check_idle(self) -> None:
        """Nothing runs, waits or is held, and every block is free or cached."""
        deadline = time.monotonic() + PATIENCE_S
        while (stats := self.check_stats()).running + stats.waiting and time.monotonic() < deadline:
            time.sleep(0.001)  # those whose consumer has left are not waited for
        core = self.engine._loop.core
        self.flush()  # what is on its way to a tier holds its blocks
        stats = self.check_stats()
        self.engine.check_integrity()
        scheduler, allocators = core.scheduler, [home.allocator for home in core.scheduler.homes]
        left = {
            "running": stats.running,
            "waiting": stats.waiting,
            "held blocks": sum(allocator.num_held for allocator in allocators),
            "live requests": len(core._requests),
            "copies": sum(len(home._copies) for home in scheduler.homes),
            "cached blocks in use": sum(each.num_cached - each.num_evictable for each in allocators)
            - self.pins.check(),
            "failed tiers": sum(tier._failed for home in scheduler.homes for tier in home._tiers),
            "sequences": len(scheduler.running) + len(scheduler.waiting),
            "cached blocks without a cache": 0 if scheduler.cache.enabled else stats.blocks_cached,
        }
        if any(left.values()):
            raise Violation(f"left behind when idle: { {name: count for name, count in left.items() if count} }")

    def check_outcomes(self) -> None:
        """Every output against the reference, and what it says of the cache against the ledger."""
        for submission in self.submissions:
            expected = self.expected(submission)
            wrong = list(submission.faults(expected, self.faults.victims, self.closing))
            wrong += self.claims.faults(submission)
            wrong += self._faults_of_rendering(submission)
            self.violations += [f"request {submission.label}, {submission.case}: {text}" for text in wrong]
        if self.violations:
            raise Violation("\n".join(self.violations[:8]))

    def expected(self, submission: Submission) -> Any:
        """What the request gives alone."""
        if isinstance(submission.case, Turn):
            return self.reference.answer(self.path, submission.case, submission.prompt, submission.limit)
        seed = None
        if submission.case.kind in UNSEEDED:
            if submission.request_id is None:  # it left before it had a number, and before it gave anything
                seed = 0
            else:
                number = submission.request_id.removeprefix("req-")
                seed = random.Random(f"{self.chosen['seed']}/{number}").getrandbits(63)
        return self.reference.output(self.path, submission.case, submission.limit, seed)

    def _faults_of_rendering(self, submission: Submission) -> list[str]:
        """A conversation's tokens say what its template says, whatever spelling its earlier answers come in."""
        case = submission.case
        if not isinstance(case, Turn):
            return []
        rendered = self.reference.rendered(self.path, case)
        self.respelled += rendered.token_ids != submission.prompt
        text = self.reference.decode(self.path, submission.prompt)
        return [] if text == rendered.text else [f"its prompt says {text!r}, not {rendered.text!r}"]

    def _probe(self, rng: random.Random) -> None:
        """A prompt that was just computed is reused but for one token, or for its last block where memory is short."""
        served = [one for one in self.submissions if one.output and "prompt_logprobs" not in one.case.sampling]
        if not served:
            return
        submission, size = rng.choice(served), self.chosen["block_size"]
        scheduler = self.engine._loop.core.scheduler
        self.flush()
        options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "cache_salt": submission.salt}
        for wanted in (None, len(submission.prompt) - 1):
            found = self.engine.explain(submission.prompt, cache_salt=submission.salt).matched_tokens
            expected = min(found, len(submission.prompt) - 1) if wanted is None else wanted
            cached = self.engine.generate(submission.prompt, **options).usage.cached_tokens
            self._probed += 1
            blocks = scheduler.home_of(len(submission.prompt)).allocator.num_blocks
            is_short = -(-len(submission.prompt) // size) >= blocks  # no block for the copy's source
            lost = wanted is None and cached < expected and self.may_lose_files
            if cached != expected and not lost and not (is_short and cached == expected // size * size):
                raise Violation(
                    f"the prompt of request {submission.label} ({len(submission.prompt)} tokens, {found} of them "
                    f"cached, says explain) was given {cached} cached tokens, not {expected}"
                )

    def close(self, *, alone: bool = True) -> None:
        """Close the engine, whatever runs; nobody may be left waiting and, if it is alone, no thread may be left."""
        self.closing = True
        self._end_thread()
        for submission in self.submissions:
            if not submission.quiet and not submission.done.wait(PATIENCE_S):
                raise Violation(f"request {submission.label} ({submission.case}) waits for a closed engine")
        try:
            self.engine.stats()
        except EngineClosedError:
            pass
        else:
            raise Violation("a closed engine answered")
        deadline = time.monotonic() + PATIENCE_S
        while alone and (left := [thread for thread in self._own_threads() if thread.is_alive()]):
            if time.monotonic() > deadline:
                raise Violation(f"threads left after close: {left}")
            time.sleep(0.0005)
        self.check_outcomes()
        self.claims.leave()

    def summary(self) -> dict[str, int]:
        """What happened in it, in numbers."""
        outputs = [one.output for one in self.submissions if one.output is not None]
        ends = [completion.finish_reason for output in outputs for completion in output.outputs]
        counts = {name: getattr(self._last, name) for name in _GROWING}
        return {
            **counts,
            "requests": len(self.submissions),
            "completions compared in full": sum(reason in FINISHED for reason in ends),
            "completions interrupted": len(ends) - sum(reason in FINISHED for reason in ends),
            "streams left": sum(one.quiet for one in self.submissions),
            "errors raised": self.faults.raised,
            "pins dropped": self.pins.dropped,
            "prompts in another spelling": self.respelled,
        }

    def _end_thread(self) -> None:
        closer = threading.Thread(target=self.engine.close, daemon=True)
        closer.start()
        closer.join(PATIENCE_S)
        if closer.is_alive():
            frame = sys._current_frames().get(self.engine._loop._thread.ident or 0)
            self.stuck = True
            raise Violation("the engine does not close:\n" + "".join(traceback.format_stack(frame)))

    def _own_threads(self) -> list[threading.Thread]:
        others = self._threads | self.reference.threads()
        return [t for t in threading.enumerate() if t not in others and t.name.startswith("foreword")]

    def _must_refuse(self, case: Case | Turn, prompt: list[int], salt: str | None) -> None:
        sampling = {**case.sampling, "cache_salt": salt}  # which knows how its own turns are spelled
        try:
            if isinstance(case, Turn):
                self.engine._client.prepare_chats([case.messages], None, {**case.options, **sampling})
            else:
                self.engine._client.prepare([prompt], None, sampling)
        except (PromptTooLongError, InjectedError):  # the latter waited for a tokenizer
            return
        raise Violation(f"{case}: {len(prompt)} tokens were accepted, where they cannot fit")
