"""The step loop's body: schedule, run, commit, deliver. Lives on one thread; knows no other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from foreword.core.errors import EngineClosedError, ForewordError, RequestFailedError
from foreword.core.outputs import EngineStats, FinishReason
from foreword.engine.report import Explanations
from foreword.engine.request_state import Completion, ConsumerError, ConsumerLeftError, RequestState
from foreword.kv.pins import Pinned, PinsFullError
from foreword.runtime.runner import ModelRunner
from foreword.runtime.sampler import Sample
from foreword.scheduling.plan import StepPlan
from foreword.scheduling.scheduler import Scheduler
from foreword.scheduling.sequence import Sequence

logger = logging.getLogger("foreword")

_MEASURED_TOKENS = 64
"""Steps of fewer tokens do not show how fast prompts are computed."""


class EngineCore:
    """All live requests and the one way they take through scheduler and runner."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._requests: dict[str, RequestState] = {}
        self._tokens_generated = 0
        self._pins_full = False  # which has been said
        self.explanations = Explanations()
        self.stalled = False  # the last step had nothing to compute: all wait for blocks on their way

    def enter_thread(self, nudge: Callable[[], None]) -> None:
        """Called first on the thread that calls everything else.

        ``nudge`` is called, on any thread, when blocks have arrived that a stalled core may have waited for.
        """
        for home in self.scheduler.homes:
            home.on_done = nudge
        self.runner.ops.enter_thread()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something. What is posted or arrives meanwhile may change that."""
        return self.scheduler.has_work and not self.stalled

    @property
    def prefill_speed(self) -> float | None:
        """Tokens per second of the last large steps."""
        return self.scheduler.prefill_speed

    def add(self, states: list[RequestState]) -> None:
        """Queue requests; those added together are scheduled together."""
        for state in states:
            self._requests[state.request.request_id] = state
            state.completions[0].sequence = sequence = Sequence(state.request, constraint=state.constraint)
            self.scheduler.add(sequence)

    def cancel(self, request_ids: list[str], *, quietly: bool = False) -> None:
        """End requests in whatever state they are; their blocks are free at once. Finished ones are ignored.

        ``quietly`` delivers nothing: the consumer has left.
        """
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is None:
                continue
            if quietly:
                state.detach()
            self._end(state, "cancelled")

    def cancel_all(self) -> None:
        """The engine closes: what its live requests have is no whole answer, and nobody may take it for one."""
        for request_id, state in list(self._requests.items()):
            self._end(state, "cancelled", EngineClosedError(f"the engine was closed before {request_id} had ended"))

    def abandon(self, error: BaseException) -> None:
        """The engine itself failed: every live request ends with that error, told in a way that trusts nothing here.
        Scheduler and cache are not touched. Raises nothing."""
        for state in self._requests.values():
            try:
                state.fail(_failure(state, error))
            except BaseException:  # one consumer's; the others must hear of it
                logger.exception("the consumer of request %s raised", state.request.request_id)
        self._requests.clear()

    def close(self) -> None:
        """Called last: write out what waits to be written."""
        for home in self.scheduler.homes:
            home.close()

    def step(self) -> None:
        """One forward pass and everything that follows from it. A failure ends the requests of this step only."""
        plan = self.scheduler.schedule(started := time.monotonic())
        if not plan.chunks:
            self.stalled = self.scheduler.moving
            return
        try:
            samples = self.runner.execute(plan)
        except Exception as error:
            logger.exception("a step failed; its %d sequences end with an error", len(plan.chunks))
            for sequence in self.scheduler.fail(plan):
                self._fail(sequence, error)
            return
        self._measure(plan, time.monotonic() - started)
        self.scheduler.advance(plan)
        for sample in samples:  # all forks first: a completion that ends at once takes the prompt's blocks along
            self._fork(sample)
        for sample in samples:
            self._accept(sample)

    def pin(self, namespace: bytes, token_ids: list[int], ttl_s: float | None, *, renewed: bool = False) -> Pinned:
        """Pin what is cached of ``token_ids``; see ``KVCacheManager.pin``.

        Raises:
            ValueError: the cap does not allow it; the message says in bytes how much it lacks.
        """
        cache, pool = self.scheduler.holder_of(namespace, token_ids), self.runner.pool
        try:
            return cache.pin(
                namespace, token_ids, now_s=time.monotonic(), ttl_s=ttl_s, renewed=renewed,
                elsewhere=sum(home.pins.num_blocks for home in self.scheduler.homes if home is not cache),
            )  # fmt: skip
        except PinsFullError as error:
            block = pool.geometry.bytes_per_token * pool.block_size
            most, pinned, needed = (f"{count * block:,} bytes" for count in (error.most, error.pinned, error.needed))
            raise ValueError(
                f"max_pinned_memory allows {most} of pinned KV, {pinned} are pinned, and this prefix needs {needed} "
                "more: unpin another prefix, or raise max_pinned_memory"
            ) from error

    def unpin(self, namespace: bytes, token_ids: list[int]) -> bool:
        """Take one pin of exactly ``token_ids`` back; False if there is none."""
        self.scheduler.expire_pins(time.monotonic())
        return any(home.unpin(namespace, token_ids) for home in self.scheduler.homes)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no sequence uses and no pin holds. Returns how many."""
        self.scheduler.expire_pins(time.monotonic())
        for home in self.scheduler.homes:
            home.forget_flights()
        return self.scheduler.cache.reset()

    def stats(self) -> EngineStats:
        self.scheduler.expire_pins(time.monotonic())
        scheduler, allocator = self.scheduler, self.scheduler.cache.allocator
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_total=allocator.num_blocks,
            blocks_free=allocator.num_free,
            blocks_held=allocator.num_held,
            blocks_cached=allocator.num_cached,
            blocks_pinned=sum(home.pins.num_blocks for home in scheduler.homes),
            prompt_tokens=scheduler.stats.prompt_tokens,
            tokens_reused=scheduler.stats.tokens_reused,
            tokens_restored=sum(home.restored_tokens for home in scheduler.homes),
            tokens_prefilled=scheduler.stats.tokens_prefilled,
            tokens_generated=self._tokens_generated,
            preemptions=scheduler.stats.preemptions,
            evictions=scheduler.cache.evictions,
            swap_blocks_total=0 if scheduler.host is None else scheduler.host.allocator.num_blocks,
            swap_blocks_free=0 if scheduler.host is None else scheduler.host.allocator.num_free,
            steps=self.runner.num_steps,
            prefill_tokens_per_s=self.prefill_speed,
            kv_tiles_used=self.runner.ops.tiles_used,
            kv_tiles_read=self.runner.ops.tiles_read,
        )

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless every block is accounted for and every sequence belongs to a request."""
        for home in self.scheduler.homes:
            home.check_integrity()
        sequences = self.scheduler.running + self.scheduler.waiting
        live = [c.sequence for state in self._requests.values() for c in state.live if c.sequence is not None]
        assert {id(s) for s in sequences} == {id(s) for s in live}, "sequences and requests disagree"

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        """Follow the speed of prefill, by steps that are large enough to show it."""
        tokens = sum(chunk.length for chunk in plan.chunks)
        if tokens >= _MEASURED_TOKENS and seconds > 0:
            known = self.prefill_speed
            self.scheduler.prefill_speed = tokens / seconds if known is None else 0.8 * known + 0.2 * tokens / seconds

    def _fork(self, sample: Sample) -> None:
        """The first samples behind an ``n > 1`` prompt give each further completion a sequence of its own."""
        state = self._requests[sample.sequence.request.request_id]
        if sample.index == sample.sequence.index:
            sample.sequence.num_samples = 1
        else:
            state.completions[sample.index].sequence = self.scheduler.fork(sample.sequence, sample.index)

    def _accept(self, sample: Sample) -> None:
        """Give a sampled token to its completion."""
        state = self._requests.get(sample.sequence.request.request_id)
        if state is None:  # ended while the step's earlier samples were delivered
            return
        completion = state.completions[sample.index]
        sequence = completion.sequence
        assert sequence is not None
        if sample.error is not None:
            self._fail(sequence, sample.error)
            return
        if state.first_token_s is None:
            state.first_token_s = time.monotonic()
            self._keep(state)
        self._tokens_generated += 1
        sequence.token_ids.append(sample.token_id)
        try:
            if sequence.constraint is not None:
                sequence.constraint.advance(sample.token_id)
            text = completion.append(sample.token_id, sample.logprobs, sequence.constraint)
        except Exception as error:
            self._fail(sequence, error)
            return
        if completion.finish_reason is not None:
            self.scheduler.finish(sequence)
            if sequence.constraint is not None and sequence.constraint.closed_early:
                logger.warning(
                    "request %s: its JSON was closed because max_tokens=%d came near; what it says may be cut short",
                    state.request.request_id, state.request.max_tokens,
                )  # fmt: skip
        self._deliver(state, completion, text, sample)

    def _keep(self, state: RequestState) -> None:
        """Pin what the request's cache points ask for: its prompt is computed, and its whole blocks are cached."""
        for num_tokens, ttl_s in state.keep:
            try:
                self.pin(state.request.namespace, state.request.prompt_token_ids[:num_tokens], ttl_s, renewed=True)
            except ValueError as error:  # no reason to fail a request
                if not self._pins_full:
                    logger.warning("a cache point was not pinned, and others may not be: %s", error)
                self._pins_full = True

    def _deliver(self, state: RequestState, completion: Completion, text: str, sample: Sample | None = None) -> None:
        """Pass output on. A consumer that raises has lost its request, nobody else's; what we raise it hears of."""
        if not state.live:
            self._requests.pop(state.request.request_id, None)
            state.prefill_speed = self.prefill_speed
            if (explained := state.explained()) is not None:
                self.explanations.add(explained)
        tokens = [sample.token_id] if sample else []
        logprobs = [sample.logprobs] if sample and sample.logprobs is not None else None
        try:
            state.emit(completion, text, tokens, logprobs)
        except ConsumerError as error:
            self._lose(state, error)
        except Exception as error:
            logger.exception("the output of request %s failed; it ends with an error", state.request.request_id)
            self._break(state, error)

    def _lose(self, state: RequestState, error: ConsumerError) -> None:
        """The consumer raised: it hears no more."""
        if isinstance(error.__cause__, ConsumerLeftError):
            logger.debug("the consumer of request %s has left; the request is cancelled", state.request.request_id)
        else:
            logger.error(
                "the consumer of request %s raised; the request is cancelled",
                state.request.request_id, exc_info=error.__cause__,
            )  # fmt: skip
        state.detach()
        self.cancel([state.request.request_id])

    def _break(self, state: RequestState, error: Exception) -> None:
        """What a request has cannot be made its output: it ends, all of it, with that error."""
        for completion in state.live:
            if completion.sequence is not None:
                self.scheduler.finish(completion.sequence)
        self._requests.pop(state.request.request_id, None)
        try:
            state.fail(_failure(state, error))
        except ConsumerError as lost:
            self._lose(state, lost)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        state = self._requests.get(sequence.request.request_id)
        if state is not None:
            self._end(state, "error", _failure(state, error))

    def _end(self, state: RequestState, reason: FinishReason, error: ForewordError | None = None) -> None:
        """Finish what is live of a request, for one reason."""
        for completion in state.live:
            if completion.finish_reason is not None:  # delivering one of the others has ended it
                continue
            completion.finish_reason, completion.error = reason, error
            if completion.sequence is not None:
                self.scheduler.finish(completion.sequence, keep=reason != "error")
            self._deliver(state, completion, completion.rest())


def _failure(state: RequestState, error: BaseException) -> RequestFailedError:
    failure = RequestFailedError(f"request {state.request.request_id} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
