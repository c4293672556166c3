"""A request on its caller's side: check and tokenize, hand over to the engine thread, wait for the output."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

from foreword.core.errors import EngineClosedError, PromptTooLongError
from foreword.core.explanation import CacheExplanation
from foreword.core.outputs import OutputChunk, RequestOutput
from foreword.core.request import Request
from foreword.core.sampling import SamplingParams
from foreword.core.validation import reject
from foreword.engine.explain import explain
from foreword.engine.loop import AsyncChannel, EngineLoop, SyncChannel
from foreword.engine.request_state import RequestState, Sink
from foreword.kv.explain import Evidence
from foreword.kv.namespace import Namespace
from foreword.text.beginnings import Keep, beginning, kept
from foreword.text.conversation import ChatOptions, Conversations, Rendered
from foreword.text.grammar import GrammarCompiler, GrammarState
from foreword.text.tokenizer import Tokenizer

Prompt = str | list[int]
Messages = list[dict[str, Any]]


class Limits(NamedTuple):
    """What a request must fit in.

    Attributes:
        max_model_len: tokens of prompt and output together.
        kv_tokens: tokens whose KV one sequence can have, in the pool or in the host tier.
        vocab_size: token ids are smaller.
        larger: options with which it could have more.
    """

    max_model_len: int
    kv_tokens: int
    vocab_size: int
    larger: str


class Prepared(NamedTuple):
    """A checked request that has not been submitted: it has no number and no clock yet.

    Attributes:
        constraint: what its output must look like; None leaves it open.
        chat: the conversation it answers; None for a plain prompt.
        beginning: the beginning of a conversation, if it computes that alone.
        keep: the parts of the prompt to be pinned when it is computed.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    constraint: GrammarState | None
    chat: Rendered | None
    beginning: Rendered | None = None
    keep: Sequence[Keep] = ()


class EngineClient:
    """Requests go out from here and come back here, from any thread and any event loop.

    Args:
        seed: what the random choices of requests without a seed derive from, with their number; None draws one.
        caches: whether the engine keeps KV across requests.
    """

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        limits: Limits,
        namespace: Namespace,
        seed: int | None,
        *,
        caches: bool = True,
    ) -> None:
        self.caches = caches
        self.tokenizer = tokenizer
        self.conversations = Conversations(tokenizer)
        self.limits = limits
        # Not the event loop's own pool: its threads may all be waiting for calls like the one that is prepared. One
        # thread, because most of the work holds the interpreter's lock, and requests keep the order of their calls.
        self._preparing = ThreadPoolExecutor(1, "foreword-prepare")
        self._compiler = GrammarCompiler(tokenizer, limits.vocab_size)
        self._loop = loop
        self._namespace_key = lru_cache(maxsize=1024)(lambda salt: dataclasses.replace(namespace, salt=salt).key())
        self._seed = secrets.randbits(63) if seed is None else seed
        self._numbers = itertools.count()

    # -- check -------------------------------------------------------------------------------------------------

    def prepare(self, prompts: Sequence[Prompt], params: Any, sampling: dict[str, Any]) -> list[Prepared]:
        """Tokenize and check a whole batch before anything of it is submitted."""

        def one(prompt: Prompt, own: SamplingParams | None) -> Prepared:
            return self._check(self._token_ids(prompt), SamplingParams.build(own, **sampling))

        return self._prepare_each(prompts, params, one)

    def prepare_chats(self, chats: Sequence[Messages], params: Any, options: dict[str, Any]) -> list[Prepared]:
        """As :meth:`prepare`, for conversations; ``options`` are those of the chat and of sampling by name."""
        chat, sampling = ChatOptions.split(options)

        def one(messages: Messages, own: SamplingParams | None) -> Prepared:
            wanted = chat.constrain(SamplingParams.build(own, **sampling))
            rendered = self.conversations.render(messages, chat, wanted)
            prepared = self._check(rendered.token_ids, wanted, rendered)
            return prepared._replace(keep=kept(rendered)) if rendered.points else prepared

        return self._prepare_each(chats, params, one)

    def prepare_beginning(self, prompt: Any, params: SamplingParams | None, options: dict[str, Any]) -> Prepared:
        """A request that computes the beginning of prompts and generates nothing that anybody reads."""
        rendered = None
        if is_conversation(prompt):
            chat, sampling = ChatOptions.split(options)
            wanted = chat.constrain(SamplingParams.build(params, **sampling))
            rendered = beginning(self.conversations, prompt, chat, wanted)
            ids = rendered.token_ids
        else:
            wanted, ids = SamplingParams.build(params, **options), self._token_ids(prompt)
        same = {name: getattr(wanted, name) for name in ("priority", "cache_priority", "cache_salt")}
        shortest = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, **same)
        return self._check(ids, shortest)._replace(beginning=rendered)

    def _prepare_each(self, prompts: Sequence[Any], params: Any, one: Callable[[Any, Any], Prepared]) -> list[Prepared]:
        if isinstance(params, (list, tuple)) and len(params) != len(prompts):
            reject("params", f"{len(params)} items", f"give one, or one for each of the {len(prompts)} prompts")
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        batch = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                batch.append(one(prompt, own))
            except ValueError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {index} of {len(prompts)} (from 0): {error}") from error
        return batch

    def _check(self, ids: list[int], params: SamplingParams, chat: Rendered | None = None) -> Prepared:
        for field in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, field):
                if token >= self.limits.vocab_size:
                    reject(field, token, f"token ids are integers from 0 to {self.limits.vocab_size - 1}")
        # the last generated token is never fed forward and needs no KV
        room = min(self.limits.max_model_len, self.limits.kv_tokens + 1) - len(ids)
        if room < 1:
            raise PromptTooLongError(self._too_long(len(ids)))
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return Prepared(ids, params, max_tokens, self._constraint(params, chat), chat)

    def _constraint(self, params: SamplingParams, chat: Rendered | None) -> GrammarState | None:
        if params.structured is None:
            return None
        tool_format = self.conversations.template.tool_format
        return self._compiler.start(params.structured, tool_format, chat.reasoning if chat else None)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, (str, list, tuple)):
            reject("prompt", prompt, "give text or a list of token ids")
        if isinstance(prompt, (list, tuple)) and any(isinstance(item, dict) for item in prompt):
            reject("prompt", prompt, "these look like messages: use chat()")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt or not ids:
            raise ValueError("the prompt is empty: give at least one character or token id")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.limits.vocab_size:
                reject("prompt", token, f"token ids are integers from 0 to {self.limits.vocab_size - 1}")
        return ids

    def _too_long(self, length: int) -> str:
        longest = self.limits.max_model_len
        if length >= longest:
            return (
                f"the prompt has {length} tokens, but max_model_len={longest} leaves room for "
                f"{longest - 1} and one generated token; shorten it or split it"
            )
        return (
            f"the prompt has {length} tokens, but the KV cache holds {self.limits.kv_tokens}; "
            f"shorten it, or give {self.limits.larger}"
        )

    def explain(self, prepared: Prepared) -> CacheExplanation:
        """How much of a prompt is cached, and why no more."""
        ids, namespace = prepared.prompt_token_ids, self.namespace_of(prepared)

        def look() -> tuple[Evidence, float | None]:
            core = self._loop.core
            return core.scheduler.cache.explain(namespace, ids), core.prefill_speed

        for cache in self._loop.call(lambda: self._loop.core.scheduler.homes):
            cache.open_now(namespace)
        evidence, speed = self._loop.call(look)
        return explain(ids, prepared.chat, evidence, self.tokenizer, speed)

    def namespace_of(self, prepared: Prepared) -> bytes:
        """Which part of the cache a request sees."""
        return self._namespace_key(prepared.params.cache_salt or "")

    # -- submit ------------------------------------------------------------------------------------------------

    def submit(self, batch: list[Prepared], put: Sink, *, stream: bool) -> list[Request]:
        """Queue the requests together, so that the scheduler sees the batch as a whole. Their clocks start here."""
        requests = [self._request(prepared) for prepared in batch]
        states = [
            RequestState(
                request,
                self.tokenizer,
                put,
                stream=stream,
                constraint=prepared.constraint,
                chat=prepared.chat,
                keep=prepared.keep,
            )
            for request, prepared in zip(requests, batch, strict=True)
        ]
        self._loop.post(lambda: self._loop.core.add(states))
        return requests

    async def submit_off_loop(self, prepare: Callable[[], list[Prepared]], put: Sink, *, stream: bool) -> list[Request]:
        """:meth:`submit` what ``prepare`` gives, beside the event loop: a long prompt takes milliseconds to tokenize, a
        new grammar tens of them to compile, and many calls that start together would hold up the loop for all of that.
        """
        self._loop.check_usable()
        loop = asyncio.get_running_loop()
        lock, submitted, left = threading.Lock(), list[Request](), False

        def submit() -> list[Request]:
            if left or loop.is_closed():
                return submitted
            batch = prepare()
            with lock:
                if not left and not loop.is_closed():
                    submitted.extend(self.submit(batch, put, stream=stream))
            return submitted

        try:
            return await loop.run_in_executor(self._preparing, submit)
        except BaseException:  # also GeneratorExit, where the coroutine is closed
            with lock:  # what has not been submitted by now never is
                left = True
            self.cancel(submitted)
            raise

    def _request(self, prepared: Prepared) -> Request:
        number, params = next(self._numbers), prepared.params
        return Request(
            request_id=f"req-{number}",
            number=number,
            prompt_token_ids=prepared.prompt_token_ids,
            params=params,
            namespace=self.namespace_of(prepared),
            arrival_s=time.monotonic(),
            max_tokens=prepared.max_tokens,
            seed=random.Random(f"{self._seed}/{number}").getrandbits(63) if params.seed is None else params.seed,
            source=prepared.chat or prepared.beginning,
        )

    def cancel(self, requests: list[Request]) -> None:
        """End the requests, whose consumer has left; those that are finished are left alone."""
        ids = [request.request_id for request in requests]
        with contextlib.suppress(EngineClosedError):  # closing has cancelled them
            self._loop.post(lambda: self._loop.core.cancel(ids, quietly=True))

    def close(self) -> None:
        """No more requests will be prepared."""
        self._preparing.shutdown(wait=False)

    # -- wait --------------------------------------------------------------------------------------------------

    def run(self, batch: list[Prepared]) -> list[RequestOutput]:
        """Submit and wait for all outputs, in the order of ``batch``."""
        channel, outputs = SyncChannel(), dict[str, RequestOutput]()
        requests = self.submit(batch, channel.put, stream=False)
        try:
            while len(outputs) < len(requests):
                _collect(channel.get(), outputs)
        finally:
            if len(outputs) < len(requests):
                self.cancel(requests)
        return [outputs[request.request_id] for request in requests]

    async def arun(self, prepare: Callable[[], list[Prepared]]) -> list[RequestOutput]:
        """:meth:`run` for asyncio, of what ``prepare`` gives."""
        channel, outputs = AsyncChannel(), dict[str, RequestOutput]()
        requests = await self.submit_off_loop(prepare, channel.put, stream=False)
        try:
            while len(outputs) < len(requests):
                _collect(await channel.get(), outputs)
        finally:
            if len(outputs) < len(requests):
                self.cancel(requests)
        return [outputs[request.request_id] for request in requests]

    def stream(self, prepared: Prepared) -> Generator[OutputChunk, None, None]:
        """Submit at the first ``next`` and yield the chunks; closing the generator cancels the request."""
        channel, done = SyncChannel(), False
        requests = self.submit([prepared], channel.put, stream=True)
        try:
            while not done:
                self._loop.check_process()
                chunk = channel.get()
                done = chunk.output is not None
                yield _raise_error(chunk)
        finally:
            if not done:
                self.cancel(requests)

    async def astream(self, prepare: Callable[[], list[Prepared]]) -> AsyncGenerator[OutputChunk, None]:
        """:meth:`stream` for asyncio; also the request is prepared at the first ``anext`` only."""
        channel, done = AsyncChannel(), False
        requests = await self.submit_off_loop(prepare, channel.put, stream=True)
        try:
            while not done:
                self._loop.check_process()
                chunk = await channel.get()
                done = chunk.output is not None
                yield _raise_error(chunk)
        finally:
            if not done:
                self.cancel(requests)


def is_conversation(prompt: Any) -> bool:
    """Whether it is messages rather than a text or token ids."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], dict)


def single(outputs: list[RequestOutput]) -> RequestOutput:
    """The one output; raises the error with which it ended."""
    if outputs[0].error is not None:
        raise outputs[0].error
    return outputs[0]


def _collect(chunk: OutputChunk, outputs: dict[str, RequestOutput]) -> None:
    if chunk.output is not None:
        outputs[chunk.request_id] = chunk.output


def _raise_error(chunk: OutputChunk) -> OutputChunk:
    if chunk.output is not None and chunk.output.error is not None:
        raise chunk.output.error
    return chunk
