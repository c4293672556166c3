"""What callers do with the cache besides filling it: look into it, warm it, pin in it, fork from it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

from foreword.core.explanation import CacheExplanation
from foreword.core.outputs import RequestOutput, Warmed
from foreword.core.report import CacheReport
from foreword.core.sampling import SamplingParams
from foreword.core.validation import reject, seconds
from foreword.engine.client import EngineClient, Messages, Prepared, Prompt, is_conversation, single
from foreword.engine.loop import EngineLoop
from foreword.engine.report import report

Tools = list[dict[str, Any]] | None


class Steering:
    """The methods of :class:`foreword.Engine` that look into the cache and steer it."""

    _loop: EngineLoop
    _client: EngineClient

    # -- look --------------------------------------------------------------------------------------------------

    def explain(
        self,
        prompt: Prompt | Messages,
        tools: Tools = None,
        *,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> CacheExplanation:
        """How much of a prompt or conversation is cached, and where and why the match ends. Runs no model.

        It finds what keeps a prompt from being reused: a date or a name near the head, a tool list that changes.
        ``params`` and ``options`` are those of :meth:`chat`. Every output has the same of its own prompt, as
        ``output.prefix``.
        """
        self._loop.check_usable()
        if is_conversation(prompt):
            [prepared] = self._client.prepare_chats([prompt], params, {"tools": tools, **options})  # type: ignore[list-item]
        else:
            [prepared] = self._client.prepare([prompt], params, options)  # type: ignore[list-item]
        return self._client.explain(prepared)

    def cache_report(self) -> CacheReport:
        """Where the tokens of the latest requests went: what was reused, and where the others parted from it."""
        return report(self._loop.call(lambda: self._loop.core.explanations.snapshot()))

    # -- warm and pin ------------------------------------------------------------------------------------------

    def warm(
        self,
        prompt: Prompt | Messages,
        tools: Tools = None,
        *,
        pin: bool = False,
        ttl: float | str | None = None,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Warmed:
        """Compute a beginning now, so that the prompts that start with it find it cached.

        Args:
            prompt: a text, token ids, or messages; of these, what all prompts have in common that go on from them.
            pin: also pin it, as :meth:`pin` does.
            ttl: how long to pin it: seconds, or text such as "5m" or "1h"; None until it is unpinned.
            params, **options: those of :meth:`chat` that shape a prompt and its place in the cache: the salt,
                ``cache_priority``, ``template_options``, ``structured`` with ``schema_in_prompt``.

        Raises:
            ValueError: as :meth:`chat` and :meth:`pin`; or the engine caches nothing. What would not fit the cap of
                pins is computed all the same.
        """
        ttl_s = _pin_time(pin, ttl)
        beginning = self._beginning(prompt, tools, params, options)
        output = single(self._client.run([beginning]))
        return self._warmed(output, beginning, pin, ttl_s)

    async def awarm(
        self,
        prompt: Prompt | Messages,
        tools: Tools = None,
        *,
        pin: bool = False,
        ttl: float | str | None = None,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Warmed:
        """:meth:`warm` for asyncio. Cancelling the task cancels the request."""
        ttl_s, prepared = _pin_time(pin, ttl), list[Prepared]()

        def prepare() -> list[Prepared]:
            prepared.append(self._beginning(prompt, tools, params, options))
            return prepared

        output = single(await self._client.arun(prepare))
        return await asyncio.to_thread(self._warmed, output, prepared[0], pin, ttl_s)

    def pin(
        self,
        prompt: Prompt | Messages,
        tools: Tools = None,
        *,
        ttl: float | str | None = None,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> int:
        """Keep what is cached of a beginning from being evicted, until it is unpinned or ``ttl`` has passed.

        The beginning and the options are as in :meth:`warm`. What is not cached cannot be pinned: warm it. Pinned
        several times, it stays until it was unpinned as often. Only a request that otherwise could never run takes KV
        memory back from pins, the oldest first, with a warning.

        Returns:
            How many leading tokens are pinned now.

        Raises:
            ValueError: ``max_pinned_memory`` does not allow it; or the engine caches nothing.
        """
        ttl_s = _pin_time(True, ttl)
        return self._pin(self._beginning(prompt, tools, params, options), ttl_s)

    def unpin(
        self,
        prompt: Prompt | Messages,
        tools: Tools = None,
        *,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> bool:
        """Take one pin of exactly this beginning back. False if there is none: it was never made, or has lapsed."""
        beginning = self._beginning(prompt, tools, params, options)
        namespace = self._client.namespace_of(beginning)
        return self._loop.call(lambda: self._loop.core.unpin(namespace, beginning.prompt_token_ids))

    def reset_prefix_cache(self) -> int:
        """Forget all cached KV that no running request uses and no pin holds. Returns the number of blocks freed.

        What is pinned stays pinned and cached: unpin it first, or let its time pass. ``swap_space`` is emptied too;
        what ``cache_dir`` holds stays, and comes back with the next prompt that begins with it.
        """
        return self._loop.call(lambda: self._loop.core.reset_prefix_cache())

    # -- fork --------------------------------------------------------------------------------------------------

    def fork(
        self, output: RequestOutput, n: int, params: SamplingParams | None = None, **sampling: Any
    ) -> list[RequestOutput]:
        """``n`` different continuations of a finished answer, whose prompt and tokens are all reused but the last.

        They go on behind the last token of ``output.outputs[0]``, or before the end token if it has one, as plain text:
        an output's ``message`` is None. With a ``seed`` each continuation gets one of its own that derives from it.
        The answer's ``cache_salt`` is taken along, unless another one is given.

        Raises:
            ValueError: ``n`` is no positive integer, or an option is not valid. RequestFailedError: one failed.
        """
        return [single([each]) for each in self._client.run(self._branches(output, n, params, sampling))]

    async def afork(
        self, output: RequestOutput, n: int, params: SamplingParams | None = None, **sampling: Any
    ) -> list[RequestOutput]:
        """:meth:`fork` for asyncio. Cancelling the task cancels the requests."""
        outputs = await self._client.arun(lambda: self._branches(output, n, params, sampling))
        return [single([each]) for each in outputs]

    # -- how ---------------------------------------------------------------------------------------------------

    def _beginning(
        self, prompt: Prompt | Messages, tools: Tools, params: SamplingParams | None, options: dict[str, Any]
    ) -> Prepared:
        self._loop.check_usable()
        if not self._client.caches:
            raise ValueError("enable_prefix_caching=False: this engine keeps nothing that could be warmed or pinned")
        if is_conversation(prompt):
            return self._client.prepare_beginning(prompt, params, {"tools": tools, **options})
        if tools is not None:
            reject("tools", tools, "a text shows no tools; give messages")
        return self._client.prepare_beginning(prompt, params, options)

    def _warmed(self, output: RequestOutput, beginning: Prepared, pin: bool, ttl_s: float | None) -> Warmed:
        pinned = self._pin(beginning, ttl_s) if pin else 0
        return Warmed(output.usage.prompt_tokens, output.usage.cached_tokens, pinned)

    def _pin(self, beginning: Prepared, ttl_s: float | None) -> int:
        namespace, token_ids = self._client.namespace_of(beginning), beginning.prompt_token_ids
        return self._loop.call(lambda: self._loop.core.pin(namespace, token_ids, ttl_s).num_tokens)

    def _branches(self, output: RequestOutput, n: int, params: Any, sampling: dict[str, Any]) -> list[Prepared]:
        if not isinstance(output, RequestOutput):
            reject("output", output, "give what a call of this engine returned")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            reject("n", n, "give an integer of at least 1")
        wanted = SamplingParams.build(params, **sampling)
        if wanted.n != 1:
            reject("params.n", wanted.n, "each continuation is an output of its own: leave it 1")
        if wanted.cache_salt is None:
            wanted = dataclasses.replace(wanted, cache_salt=output.cache_salt)
        ids = output.token_ids
        if ids and output.stop_reason is None and ids[-1] in self._client.tokenizer.eos_token_ids:
            ids = ids[:-1]
        each = [wanted] * n
        if wanted.seed is not None:
            seeds = [random.Random(f"{wanted.seed}/{index}").getrandbits(63) for index in range(n)]
            each = [dataclasses.replace(wanted, seed=seed) for seed in seeds]
        self._loop.check_usable()
        return self._client.prepare([output.prompt_token_ids + ids] * n, each, {})


def _pin_time(pin: bool, ttl: float | str | None) -> float | None:
    if not isinstance(pin, bool):
        reject("pin", pin, "give True or False")
    if ttl is not None and not pin:
        reject("ttl", ttl, "it is the time of a pin; give pin=True as well")
    return None if ttl is None else seconds("ttl", ttl)
