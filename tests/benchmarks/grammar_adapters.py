"""llguidance and xgrammar behind one face: canonical JSON, raw UTF-8, keys as in the schema."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Protocol

Encode = Callable[[str], list[int]]
_SEPARATORS = (", ", ": ")


class Refused(Exception):
    """The library says that it cannot honour the schema."""


class State(Protocol):
    """Where one output stands in its grammar."""

    def mask(self) -> bytes:
        """One bit per token that may come next."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False if it is not allowed."""

    def complete(self) -> bool:
        """Whether the output may end here."""

    def copy(self) -> State: ...

    def rollback(self, count: int) -> None: ...


class _LLGuidanceState:
    def __init__(self, matcher: Any, buffer: Any) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        self._matcher, self._buffer, self._fill = matcher, buffer, fill_next_token_bitmask

    def mask(self) -> bytes:
        self._fill(self._matcher, self._buffer, 0)
        return self._buffer  # type: ignore[no-any-return]

    def accept(self, token: int) -> bool:
        return self._matcher.try_consume_tokens([token]) == 1

    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def copy(self) -> State:
        return _LLGuidanceState(self._matcher.deep_copy(), self._buffer)

    def rollback(self, count: int) -> None:
        assert self._matcher.rollback(count)


class LLGuidance:
    """``tokens``: the bytes of every token, the end token last; ``encode`` tokenises, for bytes that are forced."""

    name = "llguidance"

    def __init__(self, tokens: list[bytes], encode: Encode) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.numpy import allocate_token_bitmask

        class Vocabulary:
            eos_token_id, bos_token_id, special_token_ids = len(tokens) - 1, None, [len(tokens) - 1]

            def __init__(self) -> None:
                self.tokens = tokens

            def __call__(self, text: bytes | str) -> list[int]:
                return encode(text if isinstance(text, str) else text.decode())

        self._tokenizer = LLTokenizer(TokenizerWrapper(Vocabulary()))
        self._buffer = allocate_token_bitmask(1, len(tokens))

    def compile(self, schema: dict[str, Any]) -> State:
        from llguidance import LLMatcher

        options: Any = dict(zip(("item_separator", "key_separator"), _SEPARATORS, strict=True))
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), overrides={"whitespace_flexible": False, **options}
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise Refused(matcher.get_error())
        return _LLGuidanceState(matcher, self._buffer)


class _XGrammarState:
    def __init__(self, matcher: Any, buffer: Any) -> None:
        self._matcher, self._buffer = matcher, buffer

    def mask(self) -> bytes:
        if not self._matcher.fill_next_token_bitmask(self._buffer, 0):
            self._buffer.fill(-1)
        return self._buffer  # type: ignore[no-any-return]

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def copy(self) -> State:
        return _XGrammarState(self._matcher.fork(), self._buffer)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)


class XGrammar:
    """``tokens``: the bytes of every token, the end token last; ``encode`` is not needed."""

    name = "xgrammar"

    def __init__(self, tokens: list[bytes], encode: Encode) -> None:  # noqa: ARG002
        import numpy as np
        from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

        info = TokenizerInfo(tokens, VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1])
        self._compiler = GrammarCompiler(info, max_threads=os.cpu_count() or 1, cache_enabled=False)
        self._buffer = np.zeros((1, (len(tokens) + 31) // 32), dtype=np.int32)

    def compile(self, schema: dict[str, Any]) -> State:
        from xgrammar import GrammarMatcher

        try:
            compiled = self._compiler.compile_json_schema(
                json.dumps(schema, ensure_ascii=False), any_whitespace=False, separators=_SEPARATORS, strict_mode=False
            )
        except RuntimeError as error:
            raise Refused(str(error)) from error
        return _XGrammarState(GrammarMatcher(compiled), self._buffer)


LIBRARIES: dict[str, Callable[[list[bytes], Encode], LLGuidance | XGrammar]] = {
    "llguidance": LLGuidance,
    "xgrammar": XGrammar,
}
