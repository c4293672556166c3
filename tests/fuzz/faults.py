"""Errors put into an engine: armed by an operation, raised once, and a record of whom they may concern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foreword import Engine

PARTS = ("forward", "logits", "sample", "detokenize", "tokenize")


class InjectedError(Exception):
    """What the fuzzer raises inside the engine."""


class Faults:
    """The errors of one engine.

    Attributes:
        victims: ids of the requests that an injected error ends: all of the step, or the one that was served.
    """

    def __init__(self, engine: Engine) -> None:
        self.victims: set[str] = set()
        self.raised = 0
        self._armed: dict[str, int] = {}
        self._step: set[str] = set()
        core = engine._loop.core
        runner: Any = core.runner
        wrap(runner, "execute", self._around_step)
        wrap(runner.model, "forward", self._failing("forward"))
        wrap(runner.model, "logits", self._failing("logits"))
        wrap(runner._sampler, "settle", self._around_settle)
        wrap(engine._client, "_token_ids", self._failing("tokenize"))
        wrap(core, "add", self._around_add)

    def arm(self, part: str, after: int) -> None:
        """The call of ``part`` behind the next ``after`` ones raises."""
        self._armed[part] = after

    def disarm(self) -> None:
        self._armed.clear()

    def _check(self, part: str, concerned: set[str]) -> None:
        left = self._armed.get(part)
        if left is None:
            return
        if left:
            self._armed[part] = left - 1
            return
        del self._armed[part]
        self.victims |= concerned
        self.raised += 1
        raise InjectedError(f"injected into {part}")

    def _failing(self, part: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(*args: Any, **kwargs: Any) -> Any:
                self._check(part, set() if part == "tokenize" else self._step)
                return original(*args, **kwargs)

            return method

        return make

    def _around_step(self, original: Any) -> Any:
        def execute(plan: Any) -> Any:
            self._step = {chunk.sequence.request.request_id for chunk in plan.chunks}
            return original(plan)

        return execute

    def _around_settle(self, original: Any) -> Any:
        def settle(sequence: Any, token: int) -> int:
            self._check("sample", {sequence.request.request_id})
            return int(original(sequence, token))

        return settle

    def _around_add(self, original: Any) -> Any:
        def add(states: list[Any]) -> None:
            for state in states:
                for completion in state.completions:
                    self._watch_text(completion._detokenizer, state.request.request_id)
            original(states)

        return add

    def _watch_text(self, detokenizer: Any, request_id: str) -> None:
        def make(original: Any) -> Any:
            def append(token_id: int) -> str:
                self._check("detokenize", {request_id})
                return str(original(token_id))

            return append

        wrap(detokenizer, "append", make)


def wrap(target: Any, name: str, make: Callable[[Any], Any]) -> None:
    """``target.name`` becomes ``make(target.name)``, of this one object."""
    setattr(target, name, make(getattr(target, name)))
