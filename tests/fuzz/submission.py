"""One request on its way, and how what came of it may differ from the reference."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from foreword import EngineClosedError, RequestFailedError, RequestOutput
from foreword.core.outputs import CompletionOutput, OutputChunk

from .cases import Case
from .chats import Turn
from .faults import InjectedError

FINISHED = ("stop", "length")
_NAMED = re.compile(r"req-\d+")  # an error says whose it is


class Violation(AssertionError):
    """Something that must hold does not."""


class Submission:
    """What the fuzzer knows of a request that it handed to an engine.

    Args:
        label: the operation's number, and which of its requests it is.
        prompt: its token ids.
        limit: tokens it may generate in that engine.
        position: how many requests the engine's ledger held before it.
        raises_at: the piece of output at which its consumer raises; None if it never does.

    Attributes:
        request_id: the engine's name for it; None before it is known.
        pieces: what its consumer was given, in order. ``streams`` says whether they are all there is,
            ``posted`` whether nobody waits for them.
        output: the whole output, once it is there; ``error`` what was raised instead.
        horizon: how many requests the ledger held when it ended.
        left: somebody ended it: a cancelled call, a closed stream, a consumer that raised, a closed engine.
        quiet: whoever ended it hears nothing more of it.
    """

    def __init__(
        self, label: str, case: Case | Turn, salt: str | None, prompt: list[int], limit: int, position: int,
        raises_at: int | None = None,
    ) -> None:  # fmt: skip
        self.label = label
        self.case = case
        self.salt = salt
        self.prompt = prompt
        self.limit = limit
        self.position = position
        self.raises_at = raises_at
        self.request_id: str | None = None
        self.pieces: list[OutputChunk] = []
        self.streams = self.posted = False
        self.output: RequestOutput | None = None
        self.error: BaseException | None = None
        self.horizon: int | None = None
        self.left = self.quiet = False
        self.done = threading.Event()

    def take(self, chunk: OutputChunk, ledger_length: int) -> None:
        """Its consumer: remember the piece, or raise."""
        self.request_id = chunk.request_id
        if self.raises_at == len(self.pieces):
            self.left = self.quiet = True
            self.done.set()
            raise InjectedError("injected into a consumer")
        self.pieces.append(chunk)
        if chunk.output is not None:
            self.finish(chunk.output, ledger_length)

    def finish(self, output: RequestOutput | None, ledger_length: int, error: BaseException | None = None) -> None:
        """It has ended, with an output or with an error."""
        named = output.request_id if output else _NAMED.search(str(error))
        if named:
            self.request_id = named if isinstance(named, str) else named[0]
        self.output, self.error, self.horizon = output, error, ledger_length
        self.done.set()

    def leave(self) -> None:
        """Its consumer is about to leave."""
        if not self.done.is_set():
            self.left = self.quiet = True

    def faults(self, reference: RequestOutput, victims: set[str], closed: bool) -> Iterator[str]:
        """In how far its outcome is wrong, in sentences.

        Args:
            reference: what it gives alone.
            victims: ids of the requests that an injected error may end.
            closed: the engine was closed while it may have run.
        """
        is_victim = self.request_id in victims
        if self.output is not None:
            yield from self._faults_of_output(self.output, reference, is_victim, closed)
        elif isinstance(self.error, EngineClosedError) and closed:
            pass
        elif self.error is not None:
            if not (isinstance(self.error, RequestFailedError) and is_victim and _is_injected(self.error)):
                yield f"it failed with {self.error!r}, which nobody injected into its step"
        elif not (self.quiet or closed):
            yield "it ended without an output"
        if self.streams:
            yield from self._faults_of_pieces(reference)

    def _faults_of_output(
        self, output: RequestOutput, reference: RequestOutput, is_victim: bool, closed: bool
    ) -> Iterator[str]:
        if output.prompt_token_ids != self.prompt:
            yield "its output reports another prompt"
        if len(output.outputs) != len(reference.outputs):
            yield f"it has {len(output.outputs)} completions, not {len(reference.outputs)}"
        finished = all(completion.finish_reason in FINISHED for completion in output.outputs)
        if finished and output.prompt_logprobs != reference.prompt_logprobs:
            yield "its prompt_logprobs differ"
        usage = output.usage
        if usage.completion_tokens != sum(len(completion.token_ids) for completion in output.outputs):
            yield f"usage counts {usage.completion_tokens} completion tokens"
        if usage.prompt_tokens != len(self.prompt):
            yield f"usage counts {usage.prompt_tokens} prompt tokens, not {len(self.prompt)}"
        for found, wanted in zip(output.outputs, reference.outputs, strict=False):
            reason = found.finish_reason
            if reason in FINISHED:
                yield from _differences(found, wanted)
                continue
            if reason == "cancelled" and not (self.left or closed):
                yield "nobody cancelled it"
            if reason == "error" and not (is_victim and found.error is not None and _is_injected(found.error)):
                yield f"it ended with {found.error!r}, which nobody injected into its step"
            yield from _unlike_beginning(found.index, found.token_ids, found.logprobs, wanted)
            if not self._cuts_text and not wanted.text.startswith(found.text):
                yield f"completion {found.index} was interrupted at {found.text!r}; alone it gives {wanted.text!r}"

    def _faults_of_pieces(self, reference: RequestOutput) -> Iterator[str]:
        """The pieces add up to the output; without one they are the beginning of what it would have been."""
        for wanted in (self.output or reference).outputs:
            pieces = [piece for piece in self.pieces if piece.index == wanted.index]
            tokens = [token for piece in pieces for token in piece.token_ids]
            text = "".join(piece.text for piece in pieces)
            logprobs = None
            if wanted.logprobs is not None:
                logprobs = [values for piece in pieces for values in piece.logprobs or []]
            if self.output is None:
                yield from _unlike_beginning(wanted.index, tokens, logprobs, wanted)
                if not self._cuts_text and not wanted.text.startswith(text):
                    yield f"the pieces of completion {wanted.index} give {text!r}, not the beginning of {wanted.text!r}"
            elif (tokens, text, logprobs) != (wanted.token_ids, wanted.text, wanted.logprobs):
                yield (
                    f"the pieces of completion {wanted.index} add up to {tokens}, {text!r} and {_short(logprobs)}, its "
                    f"output is {wanted.token_ids}, {wanted.text!r} and {_short(wanted.logprobs)}"
                )
            yield from self._faults_of_deltas(wanted.index)
        if self.output is not None and self.pieces[-1].output is not self.output:
            yield "a piece came after the last"

    def _faults_of_deltas(self, index: int) -> Iterator[str]:
        """A chat's pieces add up to the parts of its answer."""
        message = self.output and self.output.outputs[index].message
        deltas = [piece.delta for piece in self.pieces if piece.index == index and piece.delta is not None]
        calls: dict[int, list[str]] = {}
        for call in (call for delta in deltas for call in delta.tool_calls):
            calls.setdefault(call.index, []).append(call.arguments)
        content, arguments = "".join(delta.content for delta in deltas), ["".join(pieces) for pieces in calls.values()]
        if message and (content, arguments) != (message.content, [call.arguments for call in message.tool_calls]):
            yield f"the deltas of completion {index} add up to {content!r} and {arguments}, its message is {message}"

    @property
    def _cuts_text(self) -> bool:
        """Whether text held back for a stop string may be shown when it is interrupted, and cut off when not."""
        return "stop" in self.case.sampling


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    for position, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return position
    return min(len(a), len(b))


def _differences(found: CompletionOutput, wanted: CompletionOutput) -> Iterator[str]:
    for field in ("token_ids", "text", "finish_reason", "stop_reason", "logprobs"):
        mine, expected = getattr(found, field), getattr(wanted, field)
        if mine != expected:
            yield f"completion {found.index}: {field} is {_short(mine)}; alone it is {_short(expected)}"
    if _parts(found) != _parts(wanted):
        yield f"completion {found.index} is taken apart into {_parts(found)}; alone into {_parts(wanted)}"


def _parts(completion: CompletionOutput) -> Any:
    """What an answer is made of; the ids of calls are new every time."""
    message = completion.message
    return message and (message.content, message.reasoning, [(c.name, c.arguments) for c in message.tool_calls])


def _unlike_beginning(index: int, tokens: list[int], logprobs: Any, wanted: CompletionOutput) -> Iterator[str]:
    if tokens != wanted.token_ids[: len(tokens)]:
        yield f"completion {index} was interrupted behind {tokens}; alone it gives {wanted.token_ids}"
    elif logprobs is not None and wanted.logprobs is not None and logprobs != wanted.logprobs[: len(logprobs)]:
        yield f"completion {index} was interrupted, and its logprobs differ from what it gives alone"


def _is_injected(error: BaseException) -> bool:
    return isinstance(error.__cause__, InjectedError)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else text[:300] + " .."
