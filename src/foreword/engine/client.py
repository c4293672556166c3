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
from foreword.core.outputs import OutputChunk, PrefixReport, RequestOutput
from foreword.core.request import Request
from foreword.core.sampling import SamplingParams
from foreword.core.validation import reject
from foreword.engine.loop import AsyncChannel, EngineLoop, SyncChannel
from foreword.engine.request_state import RequestState, Sink
from foreword.kv.namespace import Namespace
from foreword.text.conversation import ChatOptions, Conversations, Rendered
from foreword.text.grammar import GrammarCompiler, GrammarState
from foreword.text.tokenizer import Tokenizer

_SHOWN = 16  # tokens of a text in a report
Prompt = str | list[int]
Messages = list[dict[str, Any]]


class Limits(NamedTuple):
    """What a request must fit in.

    Attributes:
        max_model_len: tokens of prompt and output together.
        kv_tokens: tokens whose KV the pool holds.
        vocab_size: token ids are smaller.
    """

    max_model_len: int
    kv_tokens: int
    vocab_size: int


class Prepared(NamedTuple):
    """A checked request that has not been submitted: it has no number and no clock yet.

    Attributes:
        constraint: what its output must look like; None leaves it open.
        chat: the conversation it answers; None for a plain prompt.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    constraint: GrammarState | None
    chat: Rendered | None


class EngineClient:
    """Requests go out from here and come back here, from any thread and any event loop.

    Args:
        seed: what the random choices of requests without a seed derive from, with their number; None draws one.
    """

    def __init__(
        self, loop: EngineLoop, tokenizer: Tokenizer, limits: Limits, namespace: Namespace, seed: int | None
    ) -> None:
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
            return self._check(rendered.token_ids, wanted, rendered)

        return self._prepare_each(chats, params, one)

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
            "shorten it or give a larger kv_cache_memory"
        )

    def explain(self, prepared: Prepared) -> PrefixReport:
        """How much of a prompt is cached, and why no more."""
        ids, salt = prepared.prompt_token_ids, prepared.params.cache_salt or ""
        cache = self._loop.core.scheduler.cache
        stop = self._loop.call(lambda: cache.explain(self._namespace_key(salt), ids, _SHOWN))
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        before = self.tokenizer.decode(ids[: stop.num_tokens], skip_special_tokens=False)
        # the last token may end inside a character
        offset = next((at for at, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        is_complete = stop.num_tokens == len(ids)
        return PrefixReport(
            prompt_tokens=len(ids),
            cached_tokens=stop.num_tokens,
            reason="complete" if is_complete else "diverged" if stop.instead else "new",
            offset=offset,
            text=self.tokenizer.decode(ids[stop.num_tokens :][:_SHOWN], skip_special_tokens=False),
            cached_text="" if is_complete else self.tokenizer.decode(stop.instead, skip_special_tokens=False),
            message=prepared.chat.owner(offset) if prepared.chat and not is_complete else None,
        )

    # -- submit ------------------------------------------------------------------------------------------------

    def submit(self, batch: list[Prepared], put: Sink, *, stream: bool) -> list[Request]:
        """Queue the requests together, so that the scheduler sees the batch as a whole. Their clocks start here."""
        requests = [self._request(prepared) for prepared in batch]
        states = [
            RequestState(
                request, self.tokenizer, put, stream=stream, constraint=prepared.constraint, chat=prepared.chat
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
            namespace=self._namespace_key(params.cache_salt or ""),
            arrival_s=time.monotonic(),
            max_tokens=prepared.max_tokens,
            seed=random.Random(f"{self._seed}/{number}").getrandbits(63) if params.seed is None else params.seed,
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


def _collect(chunk: OutputChunk, outputs: dict[str, RequestOutput]) -> None:
    if chunk.output is not None:
        outputs[chunk.request_id] = chunk.output


def _raise_error(chunk: OutputChunk) -> OutputChunk:
    if chunk.output is not None and chunk.output.error is not None:
        raise chunk.output.error
    return chunk
