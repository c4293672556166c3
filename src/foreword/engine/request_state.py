"""What the engine remembers of a live request besides its sequences: its text, its timing, where its output goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from foreword.core.constraint import Constraint
from foreword.core.errors import ForewordError
from foreword.core.message import MessageDelta
from foreword.core.outputs import (
    CompletionOutput,
    FinishReason,
    OutputChunk,
    RequestOutput,
    TokenLogprobs,
    Usage,
)
from foreword.core.request import Request
from foreword.engine.explain import LazyExplanation
from foreword.scheduling.sequence import Sequence
from foreword.text.beginnings import Keep
from foreword.text.conversation import Rendered
from foreword.text.detokenizer import IncrementalDetokenizer
from foreword.text.stop import StopStrings
from foreword.text.tokenizer import Tokenizer

Sink = Callable[[OutputChunk], None]


class ConsumerLeftError(Exception):
    """Raised by a sink: whoever waited is gone, as with a closed event loop."""


class ConsumerError(Exception):
    """A sink raised the exception that is the cause of this one."""


class Completion:
    """The text of one completion as it grows.

    Args:
        chat: the conversation it answers; None for a plain prompt.
    """

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, chat: Rendered | None = None) -> None:
        self.index = index
        self.sequence: Sequence | None = None
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: ForewordError | None = None
        self.parser = chat.parser() if chat else None
        self.complete = True
        self._tokenizer = tokenizer
        self._shown = chat.shown if chat else frozenset[int]()
        self._request = request
        self._eos = frozenset() if request.params.ignore_eos else tokenizer.eos_token_ids
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, shown=self._shown, prompt_token_ids=request.prompt_token_ids
        )
        self._stop = StopStrings(request.params.stop, request.params.include_stop_str_in_output)

    def append(self, token_id: int, logprobs: TokenLogprobs | None, constraint: Constraint | None = None) -> str:
        """Take the next token; gives the text that may be shown now. Sets ``finish_reason`` when it was the last.

        ``constraint`` has taken the token already. A token whose text cannot be made is not taken: what was handed to
        the consumer stays all there is.
        """
        count = len(self.token_ids)
        try:
            text = self._append(token_id, logprobs, constraint is not None and constraint.finished)
        except Exception:
            del self.token_ids[count:], (self.logprobs or [])[count:]
            raise
        if constraint is not None and constraint.closed_early and self.finish_reason == "stop":
            self.finish_reason = "length"
        if constraint is not None:
            self.complete = (constraint.complete or constraint.finished) and not self._is_stripped()
        return text

    def _is_stripped(self) -> bool:
        """Whether a stop string or token took some of the text away, which the constraint has seen."""
        if self.stop_reason is None:
            return False
        said = b"".join(self._tokenizer.token_bytes(token, token not in self._shown) for token in self.token_ids)
        return said != "".join(self.text).encode()

    def _append(self, token_id: int, logprobs: TokenLogprobs | None, is_complete: bool) -> str:
        params = self._request.params
        self.token_ids.append(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        may_stop = len(self.token_ids) >= params.min_tokens
        if may_stop and token_id in params.stop_token_ids:
            text = self._detokenizer.append(token_id) if params.include_stop_str_in_output else ""
            self.finish_reason, self.stop_reason = "stop", token_id
            return self._show(self._stop.flush() + text)
        if may_stop and token_id in self._eos:
            self.finish_reason = "stop"
            return self._show(self._stop.flush())
        text = self._detokenizer.append(token_id)
        if may_stop:
            text, self.stop_reason = self._stop.append(text)
        if self.stop_reason is not None:
            self.finish_reason = "stop"
        elif is_complete or len(self.token_ids) >= self._request.max_tokens:
            self.finish_reason = "stop" if is_complete else "length"
            text += self._stop.flush()
        return self._show(text)

    def rest(self) -> str:
        """What was held back for a stop string, when the completion ends for a reason of others."""
        return self._show(self._stop.flush())

    def output(self) -> CompletionOutput:
        assert self.finish_reason is not None
        return CompletionOutput(
            self.index,
            "".join(self.text),
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            self.logprobs,
            self.error,
            self.parser.message() if self.parser else None,
            self.complete,
        )

    def delta(self, text: str) -> MessageDelta | None:
        """What ``text`` adds to the parts of a chat's answer; with the last piece also what was held back."""
        if self.parser is None:
            return None
        found = self.parser.append(text)
        return found if self.finish_reason is None else found + self.parser.finish()

    def _show(self, text: str) -> str:
        if text:
            self.text.append(text)
        return text


class RequestState:
    """A live request.

    Args:
        sink: called on the engine thread with each chunk, or, unless ``stream``, with the last one only.
        constraint: what each completion begins with; None leaves them open.
        chat: the conversation it answers; None for a plain prompt.
        keep: the parts of the prompt to be pinned when it is computed.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        sink: Sink,
        *,
        stream: bool,
        constraint: Constraint | None = None,
        chat: Rendered | None = None,
        keep: Iterable[Keep] = (),
    ) -> None:
        self.request = request
        self.keep = keep
        self.constraint = constraint
        self.prefill_speed: float | None = None  # tokens per second, as measured when it ended
        self.completions = [Completion(index, request, tokenizer, chat) for index in range(request.params.n)]
        self._chat = chat
        self._tokenizer = tokenizer
        self._explained: LazyExplanation | None = None
        self.first_token_s: float | None = None
        self._sink = sink
        self._stream = stream

    @property
    def live(self) -> list[Completion]:
        """Completions that are not finished."""
        return [completion for completion in self.completions if completion.finish_reason is None]

    def emit(
        self, completion: Completion, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> None:
        """Hand a piece of output to the consumer, with the whole output if it is the last.

        Raises:
            ConsumerError: the consumer raised; its exception is the cause. Any other error is one of ours.
        """
        delta = completion.delta(text)
        self._remember(completion)
        output = None if self.live else self._output()
        if not self._stream and output is None:
            return
        self._send(
            OutputChunk(
                self.request.request_id,
                completion.index,
                text,
                token_ids,
                completion.finish_reason,
                completion.stop_reason,
                logprobs,
                output,
                delta,
            )
        )

    def fail(self, error: ForewordError) -> None:
        """Tell the consumer that the request ends with an error, of what cannot go wrong alone.

        Raises:
            ConsumerError: as in :meth:`emit`.
        """
        for completion in self.completions:
            completion.finish_reason, completion.stop_reason, completion.error = "error", None, error
        outputs = [
            CompletionOutput(
                each.index,
                "".join(each.text),
                each.token_ids,
                "error",
                logprobs=each.logprobs,
                error=error,
                complete=each.complete,
            )
            for each in self.completions
        ]
        usage = Usage(len(self.request.prompt_token_ids), completion_tokens=sum(len(o.token_ids) for o in outputs))
        output = RequestOutput(self.request.request_id, self.request.prompt_token_ids, outputs, usage)
        self._send(OutputChunk(self.request.request_id, 0, "", [], "error", output=output))

    def _send(self, chunk: OutputChunk) -> None:
        try:
            self._sink(chunk)
        except Exception as error:
            raise ConsumerError from error

    def _remember(self, completion: Completion) -> None:
        """An answer that was not cut may come back in the next turn's messages."""
        ended = completion.finish_reason in ("stop", "length") and completion.stop_reason is None
        if ended and self._chat is not None and completion.parser is not None:
            self._chat.remember(completion.parser.message(), "".join(completion.text), completion.token_ids)

    def detach(self) -> None:
        """The consumer is gone: further output goes nowhere."""
        self._sink = lambda _: None

    def _output(self) -> RequestOutput:
        request, first = self.request, self.completions[0].sequence
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None and first is not None:
            prompt_logprobs = [None, *first.prompt_logprobs]
        return RequestOutput(
            request.request_id,
            request.prompt_token_ids,
            [completion.output() for completion in self.completions],
            self._usage(),
            prompt_logprobs,
            self.explained(),
            request.params.cache_salt,
        )

    def explained(self) -> LazyExplanation | None:
        """Why no more of its prompt was cached; None if it never ran, or nothing is cached at all."""
        request, first = self.request, self.completions[0].sequence
        if self._explained is None and first is not None and first.evidence is not None:
            self._explained = LazyExplanation(
                request.prompt_token_ids,
                request.source,
                first.evidence,
                self._tokenizer,
                reused_tokens=first.cached_tokens or 0,
                prefill_speed=self.prefill_speed,
            )
        return self._explained

    def _usage(self) -> Usage:
        arrival = self.request.arrival_s
        first = self.completions[0].sequence
        started = first.first_scheduled_s if first else None
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=(first.cached_tokens or 0) if first else 0,
            completion_tokens=sum(len(completion.token_ids) for completion in self.completions),
            time_to_first_token_s=None if self.first_token_s is None else self.first_token_s - arrival,
            total_time_s=time.monotonic() - arrival,
            queue_time_s=None if started is None else started - arrival,
            num_preemptions=sum(c.sequence.num_preemptions for c in self.completions if c.sequence),
        )
