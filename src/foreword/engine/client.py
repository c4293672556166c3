"""A request on its caller's side: check and tokenize, hand over to the engine thread, wait for the output."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, NamedTuple

from foreword.core.errors import EngineClosedError, PromptTooLongError
from foreword.core.outputs import OutputChunk, RequestOutput
from foreword.core.request import Request
from foreword.core.sampling import SamplingParams
from foreword.core.validation import reject
from foreword.engine.loop import AsyncChannel, EngineLoop, SyncChannel
from foreword.engine.request_state import RequestState, Sink
from foreword.text.tokenizer import Tokenizer

Prompt = str | list[int]


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
    """A checked request that has not been submitted: it has no number and no clock yet."""

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int


class EngineClient:
    """Requests go out from here and come back here, from any thread and any event loop.

    Args:
        seed: what the random choices of requests without a seed derive from, with their number; None draws one.
    """

    def __init__(
        self, loop: EngineLoop, tokenizer: Tokenizer, limits: Limits, namespace: bytes, seed: int | None
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._loop = loop
        self._namespace = namespace
        self._seed = secrets.randbits(63) if seed is None else seed
        self._numbers = itertools.count()

    # -- check -------------------------------------------------------------------------------------------------

    def prepare(self, prompts: Sequence[Prompt], params: Any, sampling: dict[str, Any]) -> list[Prepared]:
        """Tokenize and check a whole batch before anything of it is submitted."""
        if isinstance(params, (list, tuple)) and len(params) != len(prompts):
            reject("params", f"{len(params)} items", f"give one, or one for each of the {len(prompts)} prompts")
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        batch = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                batch.append(self._prepare_one(prompt, SamplingParams.build(own, **sampling)))
            except ValueError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {index} of {len(prompts)} (from 0): {error}") from error
        return batch

    def _prepare_one(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        ids = self._token_ids(prompt)
        for field in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, field):
                if token >= self.limits.vocab_size:
                    reject(field, token, f"token ids are integers from 0 to {self.limits.vocab_size - 1}")
        # the last generated token is never fed forward and needs no KV
        room = min(self.limits.max_model_len, self.limits.kv_tokens + 1) - len(ids)
        if room < 1:
            raise PromptTooLongError(self._too_long(len(ids)))
        return Prepared(ids, params, room if params.max_tokens is None else min(params.max_tokens, room))

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

    # -- submit ------------------------------------------------------------------------------------------------

    def submit(self, batch: list[Prepared], put: Sink, *, stream: bool) -> list[Request]:
        """Queue the requests together, so that the scheduler sees the batch as a whole. Their clocks start here."""
        requests = [self._request(prepared) for prepared in batch]
        states = [RequestState(request, self.tokenizer, put, stream=stream) for request in requests]
        self._loop.post(lambda: self._loop.core.add(states))
        return requests

    def _request(self, prepared: Prepared) -> Request:
        number, params = next(self._numbers), prepared.params
        return Request(
            request_id=f"req-{number}",
            number=number,
            prompt_token_ids=prepared.prompt_token_ids,
            params=params,
            namespace=self._namespace,
            arrival_s=time.monotonic(),
            max_tokens=prepared.max_tokens,
            seed=random.Random(f"{self._seed}/{number}").getrandbits(63) if params.seed is None else params.seed,
        )

    def cancel(self, requests: list[Request]) -> None:
        """End the requests, whose consumer has left; those that are finished are left alone."""
        ids = [request.request_id for request in requests]
        with contextlib.suppress(EngineClosedError):  # closing has cancelled them
            self._loop.post(lambda: self._loop.core.cancel(ids, quietly=True))

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

    async def arun(self, batch: list[Prepared]) -> list[RequestOutput]:
        """:meth:`run` for asyncio."""
        channel, outputs = AsyncChannel(), dict[str, RequestOutput]()
        requests = self.submit(batch, channel.put, stream=False)
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

    async def astream(self, prepared: Prepared) -> AsyncGenerator[OutputChunk, None]:
        """:meth:`stream` for asyncio."""
        channel, done = AsyncChannel(), False
        requests = self.submit([prepared], channel.put, stream=True)
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
