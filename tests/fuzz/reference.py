"""What a request must give: the same one, computed alone by an engine that keeps nothing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from foreword import Engine, RequestOutput
from foreword.core.sampling import SamplingParams
from foreword.text.conversation import ChatOptions, Rendered
from support import on_device, tiny_options

from .cases import Case
from .chats import Turn
from .options import Path

ANSWERS = 1000
"""Answers of conversations that are remembered: there is no end of conversations."""


class Reference:
    """Outputs of requests that ran alone with the cache off, each computed once per path. Thread-safe.

    Args:
        model: directory of the model.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._engines: dict[Path, Engine] = {}
        self._outputs: dict[tuple[Path, int, int, int | None], RequestOutput] = {}
        self._prompts: dict[tuple[Path, int], list[int]] = {}
        self._answers: OrderedDict[tuple[Any, ...], RequestOutput] = OrderedDict()
        self._lock = threading.RLock()
        self._population: Any = None

    def __len__(self) -> int:
        return len(self._outputs)

    def start(self, population: Any) -> None:
        """From here on cases are those of ``population``; those of another one are forgotten."""
        if population is not self._population:
            self._population = population
            self._outputs.clear()
            self._answers.clear()
            self._prompts.clear()

    def prompt(self, path: Path, case: Case) -> list[int]:
        """The token ids of a case's prompt: a turn's contains the output it continues."""
        key = (path, case.number)
        with self._lock:
            if key not in self._prompts:
                self._prompts[key] = self._make_prompt(path, case)
            return self._prompts[key]

    def output(self, path: Path, case: Case, max_tokens: int | None = None, seed: int | None = None) -> RequestOutput:
        """What ``case`` gives.

        Args:
            max_tokens: tokens there is room for, where that is less than the case asks for.
            seed: of a case without a seed of its own, what the engine derived.
        """
        limit = case.max_tokens if max_tokens is None else max_tokens
        key = (path, case.number, limit, seed)
        with self._lock:
            if key not in self._outputs:
                self._outputs[key] = self._compute(path, case, limit, seed)
            return self._outputs[key]

    def rendered(self, path: Path, turn: Turn) -> Rendered:
        """The prompt of a conversation, by an engine that has no part in it."""
        with self._lock:
            options, _ = ChatOptions.split({**turn.options, "replay_turns": False})
            return self._engine(path)._client.conversations.render(turn.messages, options)

    def answer(self, path: Path, turn: Turn, prompt: list[int], max_tokens: int) -> RequestOutput:
        """What is answered to ``turn`` where it was rendered as the tokens ``prompt``."""
        key = (path, turn.key, max_tokens, tuple(prompt))
        with self._lock:
            if key not in self._answers:
                rendered, client = self.rendered(path, turn), self._engine(path)._client
                params = rendered.options.constrain(SamplingParams(**turn.sampling))
                prepared = client._check(prompt, params, rendered)
                [self._answers[key]] = client.run([prepared._replace(max_tokens=max_tokens)])
                if len(self._answers) > ANSWERS:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(key)
            return self._answers[key]

    def decode(self, path: Path, tokens: list[int]) -> str:
        """The text of tokens, special ones too."""
        with self._lock:
            return self._engine(path)._client.tokenizer.decode(tokens, skip_special_tokens=False)

    def threads(self) -> set[threading.Thread]:
        """Those of its engines."""
        with self._lock:
            return {engine._loop._thread for engine in self._engines.values()}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _make_prompt(self, path: Path, case: Case) -> list[int]:
        if case.base is not None:
            return [*self.prompt(path, case.base), *self.output(path, case.base).token_ids, *case.own_tail()]
        own = case.own_prompt()
        return self._engine(path).encode(own) if isinstance(own, str) else own

    def _compute(self, path: Path, case: Case, limit: int, seed: int | None) -> RequestOutput:
        client = self._engine(path)._client
        sampling = case.sampling if seed is None else {**case.sampling, "seed": seed}
        [prepared] = client.prepare([self.prompt(path, case)], None, sampling)
        # as where the pool ends: the sampling itself does not know that it will be cut short
        [output] = client.run([prepared._replace(max_tokens=limit)])
        assert output.error is None, output.error
        return output

    def _engine(self, path: Path) -> Engine:
        if path not in self._engines:
            options = tiny_options(blocks=64, enable_prefix_caching=False, num_threads=1, **path.options())
            self._engines[path] = Engine(self._model, **on_device(options))
        return self._engines[path]
