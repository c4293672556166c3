"""Constrained output: which tokens may come next.

The work is done by llguidance, an Earley parser over a regular-expression lexer. It was chosen over xgrammar because it
refuses by name what it does not enforce: of 55 awkward schemas it takes 4 whose instances can be wrong, all of which
are narrowed or refused here before, and xgrammar 22. It compiles a schema in 1 to 4 ms (xgrammar: 18 ms to 10 s) and
loads in 75 ms without torch (3.6 s with it). Its masks cost more, 21 to 31 us a token against 2 to 3 in the median,
but less where they are slowest, 0.9 ms against 6.7 at a vocabulary of 152,000; beside a forward pass of milliseconds
neither matters. Both copy, roll back and replay to the same bits. ``python -m tests.benchmarks.grammar_libraries``
compares them.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from foreword.core.structured import StructuredParams, tool_name
from foreword.core.validation import reject
from foreword.text.closing import Closer, ClosingWatch, first_allowed
from foreword.text.narrow import flaw
from foreword.text.schema import grammar_source, where
from foreword.text.tools.base import quote
from foreword.text.tools.canonical import canonical_tools
from foreword.text.tools.formats import ToolFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from foreword.text.reasoning import Reasoning
    from foreword.text.tokenizer import Tokenizer

_CACHED = 256  # compiled grammars
_ANSWER = "@answer"
_EXCERPT = re.compile(r"\s*(\d+ \||<state>)")
_REWORDED = {
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Use anyOf, or a constant in every branch"
}
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ")


class GrammarState:
    """How far one completion is in its grammar. Used on the engine thread only."""

    def __init__(self, matcher: LLMatcher, watch: ClosingWatch | None, end_token: int) -> None:
        self._matcher = matcher
        self._watch = watch
        self._end_token = end_token
        self.closed_early = False

    def mask(self) -> bytes:
        """One bit per token id, ``[V / 8]``, the lowest first: whether the token may come next.

        Raises:
            ValueError: the parser gave up: the grammar is too ambiguous or too large.
        """
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask

    def advance(self, token_id: int) -> None:
        """Take the next token.

        Raises:
            ValueError: it was not allowed, or the parser gave up.
        """
        self._matcher.consume_token(token_id)
        self._check()
        if self._watch is not None:
            self._watch.advance(token_id)

    def leaves_room(self, token_id: int, remaining: int) -> bool:
        """Whether the output can still match, ``remaining`` tokens behind ``token_id``."""
        return self._watch is None or self._watch.leaves_room(self._matcher, token_id, remaining)

    def closing_token(self) -> int:
        """The next token of the shortest way to an output that matches."""
        assert self._watch is not None
        self.closed_early = True
        return self._end_token if self.complete else self._watch.next_token(self._matcher)

    def fork(self) -> GrammarState:
        """A copy that goes its own way."""
        watch = None if self._watch is None else self._watch.fork()
        return GrammarState(self._matcher.deep_copy(), watch, self._end_token)

    @property
    def complete(self) -> bool:
        """Whether the output matches as it is."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether the output matches and nothing more can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot go on: {self._matcher.get_error()}")


class GrammarCompiler:
    """Grammars over the tokens of one model. Thread-safe; what is compiled is kept.

    Args:
        vocab_size: width of the logits; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()

    def start(
        self, params: StructuredParams, tool_format: ToolFormat, reasoning: Reasoning | None = None
    ) -> GrammarState:
        """A state before the first token.

        Args:
            tool_format: how the model writes tool calls.
            reasoning: the output may begin with a thought, which is free.

        Raises:
            ValueError: the grammar cannot be honoured; the message names the keyword.
        """
        source = _source(params, tool_format, reasoning, self._literal)
        with self._lock:
            state = self._compiled.get(source)
        if state is None:  # compiled outside of the lock: a slow one keeps nobody waiting
            validate_structured(params)  # its messages say where
            # a call that is cut short is an error; one that was closed early would be carried out
            state = self._compile(source, closes=params.json_schema is not None and not params.tools)
        with self._lock:
            self._compiled[source] = state
            self._compiled.move_to_end(source)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            return state.fork()

    def _compile(self, source: str, closes: bool) -> GrammarState:
        from llguidance import LLMatcher

        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
        matcher = LLMatcher(self._vocabulary.table, source, log_level=0)
        trial = matcher.deep_copy()  # what is too large for the parser shows here, not on the engine thread
        for _ in range(2):
            if not trial.is_stopped():
                trial.consume_tokens(first_allowed(trial.compute_bitmask()))
        for tried in (matcher, trial):
            if tried.is_error():
                raise ValueError(f"structured cannot be honoured: {_reason(tried.get_error())}")
        watch = ClosingWatch(self._vocabulary.closer, matcher) if closes else None
        return GrammarState(matcher, watch, self._vocabulary.eos_token_id)

    def _literal(self, text: str) -> str:
        """Lark source of a marker. Text can never spell a special token, so such a marker is named by its id."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        special = len(ids) == 1 and ids[0] in self._tokenizer.special_token_ids
        return f"<[{ids[0]}]>" if special else quote(text)


def validate_structured(structured: StructuredParams | Mapping[str, Any]) -> None:
    """Check that a constraint, or a mapping of its fields, can be honoured; needs no model.

    Raises:
        ValueError: it cannot; the message names the keyword and where it stands.
    """
    params = StructuredParams.build(structured)
    if params is None:
        return
    for index, tool in enumerate(params.tools or ()):
        parameters = tool["function"].get("parameters") or {"type": "object"}
        name = f"the parameters of tool {tool_name(index, tool)!r}"
        if parameters.get("type", "object") != "object":
            raise ValueError(f"{name} are of type {parameters['type']!r}: arguments are an object, give its properties")
        _validate_schema(name, json.dumps(parameters))
    if params.json_schema is not None:
        _validate_schema("json_schema", str(params.json_schema))
    elif not params.tools:
        field = "regex" if params.regex is not None else "grammar" if params.grammar is not None else "choices"
        reason = _refusal(_grammars(_body(params)))
        if reason:
            raise ValueError(f"{field}={getattr(params, field)!r} cannot be honoured: {reason}")


@lru_cache(maxsize=256)
def _validate_schema(name: str, schema: str) -> None:
    try:
        reason = flaw(json.loads(schema))
    except (AttributeError, KeyError, TypeError):  # malformed: the library says where
        reason = None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply: give named schemas in $defs and references") from None
    reason = reason or _refusal(_grammars(f"start: {grammar_source(schema)}"))
    if reason:
        raise ValueError(f"{name} cannot be honoured: {reason}{where(schema, reason)}{_way_out(reason)}")


def _way_out(reason: str) -> str:
    if "uniqueItems" in reason:
        return "; where it comes from a set, use a list; or check it afterwards"
    return "; leave that out of the schema and check it afterwards" if reason.startswith("Un") else ""


def _refusal(source: str) -> str:
    """Why a grammar is refused; "" if it is not."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(source)
    return _reason(messages[0]) if failed else ""


def _source(params: StructuredParams, tool_format: ToolFormat, reasoning: Reasoning | None, literal: Any) -> str:
    """The whole grammar in llguidance's form: a thought, if there may be one, and the answer."""
    if params.tools:
        json_answer = None if params.json_schema is None else grammar_source(str(params.json_schema))
        rules = tool_format.grammar(
            canonical_tools(params.tools),
            choice=params.tool_choice,
            parallel=params.parallel_tool_calls,
            answer=json_answer,
            literal=literal,
            json=lambda schema: grammar_source(json.dumps(schema, ensure_ascii=False)),
        )
        return _grammars((reasoning.grammar("answer", literal) if reasoning else "start: answer\n") + rules)
    body = _body(params)
    return _grammars(body) if reasoning is None else _grammars(reasoning.grammar(_ANSWER, literal), answer=body)


def _body(params: StructuredParams) -> str:
    """Lark source of a constraint without tools."""
    if params.json_schema is not None:
        return f"start: {grammar_source(str(params.json_schema))}"
    if params.regex is not None:
        return f"start: /{_unslashed(params.regex)}/"
    if params.choices is not None:
        # a terminal: thousands of alternatives are too many for a rule
        return f"start: CHOICE\nCHOICE: {' | '.join(quote(choice) for choice in params.choices)}"
    from llguidance.gbnf_to_lark import any_to_lark

    assert params.grammar is not None
    try:
        lark: str = any_to_lark(params.grammar)
    except Exception as error:  # its parser raises bare exceptions
        reject("grammar", params.grammar, f"it is neither Lark nor GBNF: {error}")
    return lark


def _grammars(start: str, **others: str) -> str:
    named = {"start": start} | others
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in named.items()]})


def _unslashed(regex: str) -> str:
    """A regular expression between Lark's slashes: on one line, its own slashes escaped."""
    escaped, after_backslash = [], False
    for char in regex:
        escaped.append("\\/" if char == "/" and not after_backslash else "\\n" if char == "\n" else char)
        after_backslash = char == "\\" and not after_backslash
    return "".join(escaped)


def _reason(message: str) -> str:
    """The library's message on one line, without its place in our source and the excerpt of it."""
    lines = itertools.takewhile(lambda line: not _EXCERPT.match(line), message.strip().splitlines())
    text = " ".join(line.strip() for line in lines if line.strip())
    for theirs, ours in _REWORDED.items():
        text = text.replace(theirs, ours)
    return _PLACE.sub("", text)[:400] or "no reason given"


class _Vocabulary:
    """The tokens as llguidance knows them, and what is made of them: a quarter of a second for 50,000.

    Raises:
        ValueError: the tokenizer names no end token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not tokenizer.eos_token_ids:
            raise ValueError("structured output needs a model with an end token, and this one's tokenizer names none")
        tokens, ends = _Tokens(tokenizer, vocab_size), sorted(tokenizer.eos_token_ids)
        self.eos_token_id = tokens.eos_token_id
        self.table = LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocab_size, eos_token=ends)
        self.closer = Closer(tokens.tokens)


class _Tokens:
    """What llguidance asks of a tokenizer. Must not refer to the table that refers to it: the garbage collector does
    not see into the table, and would never free either.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(token for token in tokenizer.special_token_ids if token < vocab_size)
        self.tokens = [tokenizer.token_bytes(token, skip_special_tokens=False) for token in range(vocab_size)]
        self._encode = tokenizer.encode
        self._special = [self.tokens[token].decode(errors="replace") for token in self.special_token_ids]

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text only")
        if any(name in text for name in self._special):  # here it is text, though it reads like a token
            return [token for char in text for token in self._encode(char, False)]
        return self._encode(text, False)
