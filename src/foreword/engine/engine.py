"""The public face: one engine, callable from any thread and any event loop."""

from __future__ import annotations

import concurrent.futures
import os
import weakref
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, overload

from foreword.core.config import EngineConfig
from foreword.core.outputs import EngineStats, OutputChunk, RequestOutput
from foreword.core.sampling import SamplingParams
from foreword.engine import registry
from foreword.engine.build import build
from foreword.engine.client import EngineClient, Messages, Prepared, Prompt, single
from foreword.engine.loop import EngineLoop
from foreword.engine.steering import Steering, Tools
from foreword.kv.eviction import EvictionPolicy
from foreword.scheduling.policy import SchedulingPolicy
from foreword.text.conversation import ChatOptions

Batch = list[str] | list[list[int]]
Params = SamplingParams | list[SamplingParams] | None


class Engine(Steering):
    """A language model in this process, with a paged KV cache that computes every shared beginning once.

    All methods may be called from any number of threads and event loops at the same time.

    Args:
        model: a known name (``"smollm2-135m"``), a directory with a Hugging Face checkpoint, a ``.gguf`` file, or a
            hub repository ``"org/name"``.
        device: "cpu", "cuda", "cuda:1" and so on, with Triton (``pip install foreword[gpu]``), or "auto": "cuda" where
            there is a GPU on which the kernels pass a check, else "cpu". No GPU has run these kernels yet.
        dtype: of KV and unquantised weights: "float32", "bfloat16", or "auto" (bfloat16; on the torch kernels float32
            where the processor does not multiply bfloat16).
        quantization: of the weights: "int8" or "int4" (groups of 32; on the CPU activations in 8 bits), None
            (none), or "auto" (what a GGUF file or a quantised checkpoint came in, else "int8" on the native kernels;
            None when a ``dtype`` is given).
        kernels: on the CPU: "auto" (the best that the processor runs), "avx512_vnni", "avx512", "avx2" or "portable"
            of the native ones, or "torch" for plain torch operations. On a GPU: "auto" or "triton".
        num_threads: threads that compute, on the CPU; None takes as many as torch uses.
        max_model_len: longest sequence in tokens; None takes the model's own.
        block_size: tokens per KV block, a divisor of 128.
        kv_cache_memory: bytes for the KV cache, or text such as "512MiB". None takes a fifth of the free memory, on a
            GPU what weights and the largest step leave of ``gpu_memory_utilization``; at most what ``max_num_seqs``
            sequences of full length fill. On the CPU memory is only touched as it is used.
        kv_cache_dtype: "auto" keeps KV in the ``dtype``; "int8" in 8 bits with a scale for each token and head, so that
            nearly twice as many tokens fit, at a small error; "fp8", on a GPU, in 8-bit floating point (e4m3) without
            scales, at a larger one, where values beyond 448 become that.
        gpu_memory_utilization: share of a GPU's memory that may be used, by the engine and others together, in (0, 1];
            the CPU ignores it.
        deterministic: on a GPU, give the same bits whatever was cached, batched, chunked or preempted, at some cost in
            speed; without it logits may differ in the last places, as products and attention are cut by the size of the
            batch. On the CPU it is always so.
        max_num_seqs: sequences computed at once; more wait.
        max_num_batched_tokens: tokens per forward pass; longer prompts are computed in chunks. None: 512 on the CPU,
            8192 on a GPU.
        enable_prefix_caching: keep and reuse KV across requests.
        eviction_policy: which cached blocks go first: "slru", "lru", "lfu", "cost", or a function from
            :class:`foreword.NodeStats` to a number, the lowest going first.
        max_pinned_memory: what pins may hold, in bytes or as text such as "64MiB". None allows a quarter of the KV.
        cache_trace: a file to which one line per request is appended, without any text, for ``foreword cache replay``.
        swap_space: main memory for KV that the pool has no room for, in bytes or as text: what is evicted or preempted
            is copied back from there instead of computed again. On the CPU, sequences longer than the pool live there;
            on a GPU none can be longer than the pool, and all of this memory is taken, and held in place, at once.
        cache_dir: a directory where KV is kept on disk too: a later process that is given it goes on with what this one
            computed, checked and bit for bit; processes may share it. Salts keep their files apart.
        max_disk_cache: what ``cache_dir`` may hold, in bytes or as text.
        enable_chunked_prefill: split prompts over steps, so that running requests keep their pace.
        scheduling_policy: "fcfs", "priority", "shortest_prefill_first", "longest_prefix_match", or a class with a
            method ``key(candidate)`` (see :class:`foreword.SchedulingPolicy`).
        seed: makes the choices of requests without a seed of their own reproducible, in order of submission.

    Raises:
        ModelLoadError: the model cannot be found, read or run, or does not fit in memory.
        ValueError: an option is out of range; the message names it.

    Attributes:
        backend: what "auto" came to: kernels, weights, KV and threads.
        max_model_len, vocab_size: of the model.

    Example:
        >>> with Engine("smollm2-135m") as engine:
        ...     print(engine.chat([{"role": "user", "content": "Hello!"}], max_tokens=16).text)
    """

    shared_as: EngineConfig | None = None  # its key in the shared registry

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = "auto",
        kernels: str = "auto",
        num_threads: int | None = None,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_memory: int | str | None = None,
        kv_cache_dtype: str = "auto",
        gpu_memory_utilization: float = 0.9,
        deterministic: bool = False,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        eviction_policy: str | EvictionPolicy = "slru",
        max_pinned_memory: int | str | None = None,
        cache_trace: str | os.PathLike[str] | None = None,
        swap_space: int | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        max_disk_cache: int | str = 8 * 2**30,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str | SchedulingPolicy | type[SchedulingPolicy] = "fcfs",
        seed: int | None = None,
    ) -> None:
        self.config = EngineConfig.build(
            model,
            device=device,
            dtype=dtype,
            quantization=quantization,
            kernels=kernels,
            num_threads=num_threads,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            deterministic=deterministic,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            eviction_policy=eviction_policy,
            max_pinned_memory=max_pinned_memory,
            cache_trace=cache_trace,
            swap_space=swap_space,
            cache_dir=cache_dir,
            max_disk_cache=max_disk_cache,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling_policy=scheduling_policy,
            seed=seed,
        )
        # On a thread of its own: OpenMP's workers belong to the thread that used them first, and a child forked from
        # this one would wait for workers it does not have.
        with ThreadPoolExecutor(1, "foreword-build") as pool:
            parts = pool.submit(build, self.config).result()
        self.max_model_len = parts.limits.max_model_len
        self.vocab_size = parts.limits.vocab_size
        self.backend = parts.backend
        self._loop = EngineLoop(parts.core)
        self._client = EngineClient(
            self._loop, parts.tokenizer, parts.limits, parts.namespace, seed, caches=enable_prefix_caching
        )
        self._closer = weakref.finalize(self, self._loop.close)  # also at interpreter exit

    @classmethod
    def shared(cls, model: str | os.PathLike[str], **options: Any) -> Engine:
        """The one engine of this process for ``model`` and ``options``; each call needs one ``close()``."""
        return registry.acquire(EngineConfig.build(model, **options), lambda: cls(model, **options))

    # -- generate ----------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = ..., **sampling: Any) -> RequestOutput: ...
    @overload
    def generate(self, prompt: Batch, params: Params = ..., **sampling: Any) -> list[RequestOutput]: ...
    def generate(self, prompt: Any, params: Any = None, **sampling: Any) -> Any:
        """Complete a prompt (text or token ids), or a list of them as one batch.

        Args:
            params: sampling options, one for all prompts or one for each.
            **sampling: single options on top of ``params``, e.g. ``max_tokens=32``.

        Returns:
            The output; for a list, a list in the same order. A member that fails while it runs has
            ``finish_reason="error"`` and an ``error``; a single prompt that fails raises it.

        Raises:
            ValueError: an empty prompt or an invalid option. PromptTooLongError: the prompt does not fit.
            RequestFailedError: the single request failed while it ran. EngineClosedError: the engine is closed.
        """
        requests = self._prepare(_as_batch(prompt), params, sampling)
        outputs = self._client.run(requests)
        return outputs if _is_batch(prompt) else single(outputs)

    @overload
    def chat(
        self, messages: Messages, params: SamplingParams | None = ..., *, tools: Tools = ..., **options: Any
    ) -> RequestOutput: ...
    @overload
    def chat(
        self, messages: list[Messages], params: Params = ..., *, tools: Tools = ..., **options: Any
    ) -> list[RequestOutput]: ...
    def chat(self, messages: Any, params: Any = None, *, tools: Tools = None, **options: Any) -> Any:
        """Answer a conversation (dicts with "role" and "content"), or a list of conversations as one batch.

        Arguments, results and errors are those of :meth:`generate`; the answer's content, reasoning and tool calls
        are in the output's ``message``, whose ``as_dict()`` is what the next turn's ``messages`` take.

        Args:
            tools: OpenAI-style function definitions, shown to the model by its chat template, or in the system
                prompt where the template has no place for them.
            **options: sampling options by name, and
                ``tool_choice``: "auto", "none", "any" or "required" (at least one call), or a tool's name;
                ``parallel_tool_calls``: allow more than one call (True);
                ``canonical_tools``: sort the tools, so that a shuffled list is the same prompt (True);
                ``schema_in_prompt``: show the schema of ``structured`` to the model (False);
                ``replay_turns``: put its own answers back in the tokens in which it wrote them (True);
                ``template_options``: further variables of the chat template, e.g. ``{"enable_thinking": False}``.
        """
        outputs = self._client.run(self._prepare_chats(messages, params, tools, options))
        return outputs if _is_batch(messages) else single(outputs)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any
    ) -> Generator[OutputChunk, None, None]:
        """Complete one prompt and yield the pieces as they come. Closing the iterator cancels the request.

        Input errors are raised at once, not at the first piece; the request is submitted with the first ``next``.
        """
        return self._client.stream(self._prepare([prompt], params, sampling)[0])

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, tools: Tools = None, **options: Any
    ) -> Generator[OutputChunk, None, None]:
        """Answer one conversation and yield the pieces as they come; see :meth:`chat` and :meth:`stream`.

        Each chunk's ``delta`` says what it adds to content, reasoning and tool calls.
        """
        return self._client.stream(self._prepare_chats([messages], params, tools, options)[0])

    @overload
    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = ..., **sampling: Any
    ) -> RequestOutput: ...
    @overload
    async def agenerate(self, prompt: Batch, params: Params = ..., **sampling: Any) -> list[RequestOutput]: ...
    async def agenerate(self, prompt: Any, params: Any = None, **sampling: Any) -> Any:
        """:meth:`generate` for asyncio. Cancelling the task cancels the requests."""
        outputs = await self._client.arun(lambda: self._prepare(_as_batch(prompt), params, sampling))
        return outputs if _is_batch(prompt) else single(outputs)

    @overload
    async def achat(
        self, messages: Messages, params: SamplingParams | None = ..., *, tools: Tools = ..., **options: Any
    ) -> RequestOutput: ...
    @overload
    async def achat(
        self, messages: list[Messages], params: Params = ..., *, tools: Tools = ..., **options: Any
    ) -> list[RequestOutput]: ...
    async def achat(self, messages: Any, params: Any = None, *, tools: Tools = None, **options: Any) -> Any:
        """:meth:`chat` for asyncio. Cancelling the task cancels the requests."""
        outputs = await self._client.arun(lambda: self._prepare_chats(messages, params, tools, options))
        return outputs if _is_batch(messages) else single(outputs)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any
    ) -> AsyncGenerator[OutputChunk, None]:
        """:meth:`stream` for asyncio. Cancelling the task or closing the iterator cancels the request.

        Input errors are raised with the first piece: the request is prepared beside the event loop.
        """
        self._loop.check_usable()
        return self._client.astream(lambda: self._prepare([prompt], params, sampling))

    def astream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, tools: Tools = None, **options: Any
    ) -> AsyncGenerator[OutputChunk, None]:
        """:meth:`stream_chat` for asyncio, as :meth:`astream`."""
        self._loop.check_usable()
        return self._client.astream(lambda: self._prepare_chats([messages], params, tools, options))

    # -- text --------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt text, with the model's start token where it uses one."""
        return self._client.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._client.tokenizer.decode(ids)

    def count_tokens(self, prompt: str | Messages, tools: Tools = None, **options: Any) -> int:
        """Tokens of a text, or of a conversation through the chat template, tools included.

        With the ``options`` of a call (see :meth:`chat`) the count is exactly that call's.
        """
        if isinstance(prompt, str):
            return len(self.encode(prompt))
        chat, sampling = ChatOptions.split({"tools": tools, **options})
        params = chat.constrain(SamplingParams.build(**sampling))
        return len(self._client.conversations.render(prompt, chat, params).token_ids)

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The model's name as given."""
        return self.config.model

    @property
    def can_reason(self) -> bool:
        """Whether the model's chat template knows ``<think>`` sections."""
        return self._client.conversations.template.can_reason

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used: closed, failed, or in a forked child, where its thread is missing."""
        return self._loop.closed

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and counters."""
        return self._loop.call(lambda: self._loop.core.stats())

    def save(self) -> None:
        """Wait until what was computed is in ``cache_dir``; :meth:`close` does it too."""
        caches = self._loop.call(lambda: self._loop.core.scheduler.homes)
        concurrent.futures.wait(self._loop.call(lambda: [each for cache in caches for each in cache.under_way]))
        self._loop.call(lambda: self._loop.core.scheduler.poll())
        for cache in caches:
            cache.flush()

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless every KV block is accounted for."""
        self._loop.call(lambda: self._loop.core.check_integrity())

    def close(self) -> None:
        """Cancel what runs, end the engine thread, free the memory. A shared engine closes with its last user."""
        if self.shared_as is not None and not registry.release(self.shared_as, self):
            return
        self._closer()
        self._client.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Engine cannot be pickled or copied, its thread and memory live in this process: "
            "give model= and options instead, and create it there"
        )

    def __repr__(self) -> str:
        return f"Engine({self.config.model!r}{', closed' if self.closed else ''})"

    # -- the way of a request ----------------------------------------------------------------------------------

    def _prepare_chats(self, messages: Any, params: Any, tools: Tools, options: dict[str, Any]) -> list[Prepared]:
        self._loop.check_usable()
        chats = messages if _is_batch(messages) else [messages]
        return self._client.prepare_chats(chats, params, {"tools": tools, **options})

    def _prepare(self, prompts: Sequence[Prompt], params: Any, sampling: dict[str, Any]) -> list[Prepared]:
        self._loop.check_usable()
        return self._client.prepare(prompts, params, sampling)


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], (str, list, tuple))


def _as_batch(prompt: Any) -> list[Prompt]:
    return list(prompt) if _is_batch(prompt) else [prompt]
