"""Who runs in the next step, and with how many tokens.

Each step is formed anew: every decoding sequence gives one token; what is left of the token budget goes to prompts,
running or waiting, in the policy's order. Under memory pressure the sequence of highest rank (lowest urgency, latest
arrival) gives its blocks up and is recomputed later; as ranks never change, the first always finishes.

A sequence has its home in the KV pool, or, once it is longer than all of the pool, in the host tier: its blocks lie
there, and attention reads them there. Where attention cannot (on a GPU), no sequence is longer than the pool.
"""

from __future__ import annotations

import logging

from foreword.core.common_prefix import common_prefix_length
from foreword.kv.explain import Stop
from foreword.kv.prompt_log import LoggedPrompt
from foreword.kv.tiers import TieredCache
from foreword.kv.tree import PrefixMatch
from foreword.scheduling.plan import Chunk, SchedulerStats, StepPlan
from foreword.scheduling.policy import Candidate, SchedulingPolicy
from foreword.scheduling.sequence import Sequence, Status

logger = logging.getLogger("foreword")


class Scheduler:
    """Queues, admission, preemption.

    Args:
        cache: the KV cache manager of the pool; the scheduler is its only user.
        host: that of the host tier; None: there is no such tier.
        attends_host: whether sequences longer than the pool live in the host tier.
        policy: order of prompts.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens per step.
        chunked_prefill: whether a prompt may be computed in parts; off, a prompt longer than the budget runs whole.
    """

    def __init__(
        self,
        cache: TieredCache,
        policy: SchedulingPolicy,
        *,
        host: TieredCache | None = None,
        attends_host: bool = True,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
    ) -> None:
        self.cache = cache
        self.host = host
        self._home_of_long = cache if host is None or not attends_host else host
        self.homes = [cache] if host is None else [cache, host]
        self.policy = policy
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each running sequence may need one token
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.stats = SchedulerStats()
        self.prefill_speed: float | None = None  # tokens per second, of the last large steps; whoever runs them tells

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def capacity(self) -> int:
        """Tokens whose KV one sequence can have."""
        homes = (self.cache, self._home_of_long)
        return max(home.allocator.num_blocks for home in homes) * self.cache.block_size

    def home_of(self, num_tokens: int) -> TieredCache:
        """Where a sequence of ``num_tokens`` belongs."""
        return self.cache if self.cache.could_hold(num_tokens) else self._home_of_long

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, now_s: float) -> StepPlan:
        """Choose the next step. Reserves blocks, admits and preempts; ``now_s`` is the monotonic clock."""
        self.expire_pins(now_s)
        self.poll()
        chunks = self._schedule_decodes()
        chunks += self._schedule_prefills(self.max_num_batched_tokens - len(chunks), now_s)
        return StepPlan([copy for home in self.homes for copy in home.take_copies()], chunks)

    @property
    def moving(self) -> bool:
        """Whether anything is on its way between the caches and their tiers."""
        return any(home.busy for home in self.homes)

    def holder_of(self, namespace: bytes, tokens: list[int]) -> TieredCache:
        """Which cache has most of ``tokens``."""
        return max(self.homes, key=lambda home: home.lookup(namespace, tokens, len(tokens)).num_tokens)

    def poll(self) -> None:
        """Let land what has arrived from the tiers, or there."""
        for home in self.homes:
            home.poll()

    def advance(self, plan: StepPlan) -> None:
        """The step was computed: commit the blocks it filled."""
        self._finish_copies()
        for sequence, start, length in plan.chunks:
            if not sequence.is_decoding:
                self.stats.tokens_prefilled += length
            sequence.num_computed = start + length
            assert sequence.home is not None
            assert sequence.blocks is not None
            sequence.home.commit(sequence.blocks, sequence.token_ids, sequence.num_computed)

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Another completion of ``sequence``'s prompt; it shares the blocks, or recomputes if there is no room."""
        constraint = None if sequence.constraint is None else sequence.constraint.fork()
        child = Sequence(sequence.request, index, constraint)
        child.num_samples = 1
        child.cached_tokens = sequence.cached_tokens
        child.first_scheduled_s = sequence.first_scheduled_s
        child.prompt_logprobs = sequence.prompt_logprobs
        assert sequence.home is not None
        assert sequence.blocks is not None
        if len(self.running) < self.max_num_seqs:
            child.home = sequence.home
            child.blocks = child.home.fork(sequence.blocks, sequence.num_computed)
        if child.blocks is None:
            self.waiting.append(child)
        else:
            child.num_computed = sequence.num_computed
            child.status = Status.RUNNING
            self.running.append(child)
        return child

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """``sequence`` is done or cancelled, in whatever state; ``keep`` what it computed, or leave it at what is
        committed already."""
        self._leave(sequence, keep=keep)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step failed: its sequences leave and nothing of it is kept. Returns them."""
        self._finish_copies()
        failed = [chunk.sequence for chunk in plan.chunks]
        for sequence in failed:
            self._leave(sequence, keep=False)
        return failed

    def expire_pins(self, now_s: float) -> None:
        """Let pins lapse whose time has passed."""
        for home in self.homes:
            home.expire_pins(now_s)

    def _finish_copies(self) -> None:
        for home in self.homes:
            home.finish_copies()

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_up_blocks(sequence, keep=keep)
        sequence.status = Status.FINISHED
        if self.cache.trace is not None and sequence.cached_tokens is not None:  # it was admitted
            self.cache.trace.record(
                sequence.request.namespace,
                sequence.token_ids[: max(sequence.num_prompt, sequence.num_computed)],
                num_prompt=0 if sequence.index else sequence.num_prompt,  # a fork has its prompt without looking it up
                admitted_s=sequence.first_scheduled_s or 0.0,
                priority=sequence.request.params.cache_priority,
            )

    def _give_up_blocks(self, sequence: Sequence, *, keep: bool = True) -> None:
        assert sequence.home is not None
        assert sequence.blocks is not None
        if keep:
            sequence.home.retire(sequence.blocks, sequence.token_ids, sequence.num_computed)
            if sequence.logged is not None:
                self.cache.log.complete(sequence.logged, sequence.token_ids, sequence.num_computed)
        else:
            sequence.home.discard(sequence.blocks)
        sequence.blocks = None

    # -- decode ------------------------------------------------------------------------------------------------

    def _schedule_decodes(self) -> list[Chunk]:
        """One token of every decoding sequence, lowest rank first, so that victims are not yet scheduled."""
        chunks = []
        for sequence in sorted((s for s in self.running if s.is_decoding), key=lambda s: s.rank):
            if sequence.status is Status.RUNNING and self._make_room(sequence):
                chunks.append(Chunk(sequence, sequence.num_computed, 1))
        return chunks

    def _make_room(self, sequence: Sequence) -> bool:
        """Get ``sequence`` a slot for its next token, preempting others. False if it had to go itself."""
        home, needed = sequence.home, len(sequence.token_ids)
        assert home is not None
        assert sequence.blocks is not None
        while not home.can_grow(sequence.blocks, needed):
            outgrown = self.home_of(needed) is not home  # it goes on in the tier
            if not outgrown and any(each.wait_for_room() for each in self.homes):
                continue
            victim = sequence if outgrown else max((s for s in self.running if s.home is home), key=lambda s: s.rank)
            self._preempt(victim)
            if victim is sequence:
                return False
        home.grow(sequence.blocks, needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up_blocks(sequence)
        self.running.remove(sequence)
        sequence.num_computed = 0
        sequence.fetched, sequence.flight = False, None
        sequence.num_preemptions += 1
        if not sequence.reads_cache:
            sequence.prompt_logprobs.clear()  # the prompt is computed again from its start
        sequence.status = Status.WAITING
        self.waiting.append(sequence)
        self.stats.preemptions += 1

    # -- prefill -----------------------------------------------------------------------------------------------

    def _schedule_prefills(self, budget: int, now_s: float) -> list[Chunk]:
        """Share ``budget`` tokens among prompts, running or waiting, in the policy's order."""
        chunks: list[Chunk] = []
        admitted: list[Sequence] = []
        seats = self.max_num_seqs - len(self.running)
        full: list[TieredCache] = []
        running = [s for s in self.running if not s.is_decoding]
        for sequence in self._in_policy_order(now_s, running + self.waiting if seats > 0 and budget > 0 else running):
            if budget <= 0:
                break
            if sequence.status is Status.WAITING:
                home = self._home(sequence)
                if seats <= 0 or home in full:
                    continue
                match = self._lookup(sequence)
                if self._is_coming(sequence, match):
                    continue
                if self._will_be_cached(sequence, match, chunks):
                    seats -= 1  # it holds its place and runs when the prefix is there
                    continue
                if not self._fits_budget(len(sequence.token_ids) - match.num_tokens, budget, first=not chunks):
                    continue
                fitting = self._make_fit(home, match, len(sequence.token_ids))
                if fitting is None:
                    full.append(home)  # who comes later must not take what becomes free
                    continue
                if self._fetch(sequence, home, fitting):
                    continue
                self._admit(sequence, home, fitting, now_s)
                admitted.append(sequence)
                seats -= 1
            if not self._fits_budget(sequence.remaining, budget, first=not chunks):
                continue
            length = min(sequence.remaining, budget) if self.chunked_prefill else sequence.remaining
            chunks.append(Chunk(sequence, sequence.num_computed, length))
            budget -= length
        self._count_overtakes(admitted, {chunk.sequence for chunk in chunks})
        return chunks

    def _fits_budget(self, remaining: int, budget: int, *, first: bool) -> bool:
        """Without chunked prefill a prompt runs whole; one longer than the budget runs when it is the first."""
        return self.chunked_prefill or remaining <= budget or first

    def _in_policy_order(self, now_s: float, prefills: list[Sequence]) -> list[Sequence]:
        if len(prefills) < 2:
            return prefills
        try:
            return sorted(prefills, key=lambda s: self.policy.key(self._candidate(s, now_s)))
        except Exception:  # a user's policy; its fault must not end anybody's request
            logger.exception("the scheduling policy failed; this step runs in order of arrival")
            return sorted(prefills, key=lambda s: s.request.number)

    def _candidate(self, sequence: Sequence, now_s: float) -> Candidate:
        waiting = sequence.status is Status.WAITING
        return Candidate(
            number=sequence.request.number,
            priority=sequence.request.params.priority,
            total_tokens=len(sequence.token_ids),
            waited_s=now_s - sequence.request.arrival_s,
            overtaken=sequence.overtaken,
            num_preemptions=sequence.num_preemptions,
            count_cached=lambda: self._lookup(sequence).num_tokens if waiting else sequence.num_computed,
        )

    def _lookup(self, sequence: Sequence) -> PrefixMatch:
        limit = len(sequence.token_ids) - 1 if sequence.reads_cache else 0  # one token must be computed
        return self._home(sequence).lookup(sequence.request.namespace, sequence.token_ids, limit)

    def _home(self, sequence: Sequence) -> TieredCache:
        """Where a waiting sequence will run."""
        return self.home_of(len(sequence.token_ids))

    def _will_be_cached(self, sequence: Sequence, match: PrefixMatch, chunks: list[Chunk]) -> bool:
        """Whether a prompt served in this step is computing more of this prefix than is cached: waiting saves work.

        Prompts that run but are not served do not count: they come later in the policy's order.
        """
        if not (self.cache.enabled and sequence.reads_cache):
            return False
        size, limit, home = self.cache.block_size, len(sequence.token_ids) - 1, self._home(sequence)
        for other, start, _ in chunks:
            if other.request.namespace == sequence.request.namespace and other.home is home:
                common = common_prefix_length(other.token_ids, 0, sequence.token_ids, 0, limit)
                if common // size > max(match.num_tokens, start) // size:
                    return True
        return False

    def _is_coming(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether it waits for what it asked the tiers for, or has not asked yet and most of it is on its way."""
        if sequence.flight is not None and not sequence.flight.landed:
            return True
        namespace, tokens = sequence.request.namespace, sequence.token_ids
        return (
            not sequence.fetched
            and sequence.reads_cache
            and self._home(sequence).is_bringing(namespace, tokens, len(tokens) - 1, match.num_tokens)
        )

    def _fetch(self, sequence: Sequence, home: TieredCache, match: PrefixMatch) -> bool:
        """Have the tiers bring what they have of it beyond ``match``, if they know what they have; False: nothing."""
        if sequence.fetched or not sequence.reads_cache:
            return False
        namespace = sequence.request.namespace
        if sequence.flight is None:
            sequence.flight = home.open(namespace)
            if sequence.flight is not None:
                return True
        sequence.fetched = True
        sequence.flight = home.fetch(namespace, sequence.token_ids[:-1], match, self.prefill_speed)
        return sequence.flight is not None

    def _admit(self, sequence: Sequence, home: TieredCache, match: PrefixMatch, now_s: float) -> None:
        """Reserve blocks for the whole prompt and let it run."""
        total, request = len(sequence.token_ids), sequence.request
        if sequence.cached_tokens is None:
            self._log(sequence)
        sequence.home = home
        sequence.blocks = home.allocate(
            request.namespace, match, total, request.max_tokens, request.params.cache_priority
        )
        sequence.num_computed = sequence.blocks.cached_tokens
        sequence.status = Status.RUNNING
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            self._correct_evidence(sequence)
            sequence.first_scheduled_s = now_s
            self.stats.prompt_tokens += sequence.num_prompt
            self.stats.tokens_reused += sequence.cached_tokens

    def _make_fit(self, home: TieredCache, match: PrefixMatch, total: int) -> PrefixMatch | None:
        """The match with which ``total`` tokens find room now; None: with none.

        Where nobody uses blocks and would let go of them, they get those of the oldest pins rather than wait for ever.
        """
        users = sum(sequence.home is home for sequence in self.running)
        # left available, so that who runs can grow before anyone is preempted
        watermark = max(home.allocator.num_blocks // 100, users) if users else 0
        while True:
            if home.can_allocate(match, total, watermark):
                return match
            if any(each.saving for each in self.homes):
                return None  # there will be more room
            whole = match.whole_blocks(home.block_size)  # the copy's source may be the one block too many
            if home.can_allocate(whole, total, watermark):
                return whole
            if users or self.moving or not home.drop_oldest_pin():
                return None
            logger.warning(
                "a pinned prefix was unpinned: a request of %d tokens needs its KV memory; pin less, or give more %s",
                total, "swap_space" if home is self.host else "kv_cache_memory",
            )  # fmt: skip

    def _log(self, sequence: Sequence) -> None:
        """Note what the cache knows of the prompt, before it changes, and the prompt for those to come."""
        request, cache = sequence.request, self.cache
        if not cache.enabled:
            return
        sequence.evidence = cache.explain(request.namespace, sequence.token_ids)
        sequence.logged = LoggedPrompt(request.request_id, request.namespace, sequence.token_ids, request.source)
        cache.log.add(sequence.logged)

    def _correct_evidence(self, sequence: Sequence) -> None:
        """There may be less than was found: files go or turn out to be damaged, and a block that a match ends in cannot
        be copied without room for it."""
        evidence, cached = sequence.evidence, sequence.num_computed
        if evidence is None or not sequence.reads_cache:
            return
        if cached != min(evidence.stop.num_tokens, len(sequence.token_ids) - 1):
            sequence.evidence = evidence._replace(stop=Stop(cached, []))

    def _count_overtakes(self, admitted: list[Sequence], served: set[Sequence]) -> None:
        """Whoever gets no prefill while later requests are admitted has been overtaken by each of them."""
        numbers = [sequence.request.number for sequence in admitted]
        if not numbers:
            return
        for sequence in self.waiting + self.running:
            if sequence not in served and not sequence.is_decoding:
                sequence.overtaken += sum(number > sequence.request.number for number in numbers)
