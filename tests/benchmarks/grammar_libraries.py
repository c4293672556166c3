"""``python -m tests.benchmarks.grammar_libraries``: llguidance and xgrammar side by side, as libraries.

What is compared, in one run and in turns: what each makes of awkward schemas, what a step costs, what an import and a
schema cost, and whether the state can be copied, rolled back and replayed. A library that is not installed is left out,
and named. Needs jsonschema, tokenizers and pydantic, but not Foreword: run it in an environment of its own, since
xgrammar brings torch and transformers with it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..structured.schemas import SCHEMAS
from .grammar_adapters import LIBRARIES, Encode, LLGuidance, Refused, State, XGrammar
from .grammar_cases import CASES, OUTPUTS, Awkward, Text

LARGE = 151_936
"""The size of Qwen's vocabulary."""
_HEAVY = ("torch", "tvm_ffi", "transformers", "numpy", "triton", "pydantic")
_LOADS = {
    "llguidance": "from llguidance import LLMatcher, LLTokenizer",
    "xgrammar": "from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo",
}


# -- vocabularies --------------------------------------------------------------------------------------------------


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token of a byte-level tokenizer; an end token, the last, has none that text could hold."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    tokens = [bytes(byte_of[c] for c in name) if set(name) <= byte_of.keys() else name.encode() for name in names]
    return [*tokens[:-1], b"<end>"]


def padded(tokens: list[bytes], size: int) -> list[bytes]:
    """A synthetic vocabulary: ``tokens`` and then pairs of them, until there are ``size`` distinct ones."""
    made, seen, step = list(tokens[:-1]), set(tokens), 1
    words = [token for token in tokens if 2 <= len(token) <= 8]
    while len(made) < size - 1:
        for first, second in zip(words, words[step:], strict=False):
            pair = first + second
            if pair not in seen and len(made) < size - 1:
                seen.add(pair)
                made.append(pair)
        step += 101
    return [*made, tokens[-1]]


# -- (a) what awkward schemas come to ------------------------------------------------------------------------------

RIGHT, NARROW, REFUSED, WRONG = "right", "narrow", "refused", "WRONG"
_MEANING = {
    RIGHT: "accepts all valid instances and rejects all invalid ones",
    NARROW: "rejects some valid instances, or takes on a schema that nothing matches",
    REFUSED: "says that it does not support the schema",
    WRONG: "accepts an invalid instance without an error",
}


def written(instance: Any) -> str:
    return str(instance) if isinstance(instance, Text) else json.dumps(instance, ensure_ascii=False)


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """What jsonschema says; a schema it cannot resolve has no valid instance."""
    from jsonschema import Draft202012Validator
    from referencing.exceptions import Unresolvable

    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    try:
        return validator.is_valid(json.loads(text))
    except (Unresolvable, RecursionError):
        return False


def check_instances(cases: Iterable[Awkward]) -> None:
    """The hand-written lists against jsonschema: a mistake in them would be counted as a library's."""
    for case in cases:
        for instance in [*case.valid, *case.invalid]:
            wanted = any(instance is each for each in case.valid)
            assert is_valid(case.schema, written(instance)) == wanted, f"{case.name}: {written(instance)}"


def verdict(library: LLGuidance | XGrammar, case: Awkward, encode: Encode) -> tuple[str, str]:
    """One of the four words, and what it rests on."""
    try:
        start = library.compile(case.schema)
    except Refused as error:
        return REFUSED, " ".join(str(error).split())[-70:]

    def accepts(instance: Any) -> bool:
        state = start.copy()
        return all(state.accept(token) for token in encode(written(instance))) and state.complete()

    wrong = [written(instance) for instance in case.invalid if accepts(instance)]
    missed = [written(instance) for instance in case.valid if not accepts(instance)]
    if wrong:
        return WRONG, f"accepts {wrong[0]}"
    if missed or not case.valid:
        return NARROW, f"rejects {missed[0]}" if missed else "nothing matches"
    return RIGHT, ""


def correctness(libraries: list[LLGuidance | XGrammar], encode: Encode) -> str:
    check_instances(CASES)
    rows, counts = [], {library.name: dict.fromkeys(_MEANING, 0) for library in libraries}
    for case in CASES:
        found = [verdict(library, case, encode) for library in libraries]
        for library, (word, _) in zip(libraries, found, strict=True):
            counts[library.name][word] += 1
        rows.append([case.name, *(f"{word}: {why}" if why and word != RIGHT else word for word, why in found)])
    names = [library.name for library in libraries]
    total = [[f"{word}: {_MEANING[word]}", *(str(counts[name][word]) for name in names)] for word in _MEANING]
    return f"{table(['schema', *names], rows)}\n\n{table([f'of {len(CASES)} schemas', *names], total)}"


# -- (b) and (c) what it costs -------------------------------------------------------------------------------------


@dataclass
class Costs:
    """By what was measured, the quickest of all rounds: another program that holds the processor adds, never takes.

    The keys of steps are an output's name and the number of the token; their values are µs, all others are ms.
    """

    setup: float = math.inf
    first: dict[tuple[str, int], float] = field(default_factory=dict)
    later: dict[tuple[str, int], float] = field(default_factory=dict)
    accept: dict[tuple[str, int], float] = field(default_factory=dict)
    compile: dict[str, float] = field(default_factory=dict)
    copy: dict[str, float] = field(default_factory=dict)


def elapsed(call: Callable[[], Any], unit: float) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - begin) * unit


def keep(quickest: dict[Any, float], key: Any, cost: float) -> None:
    quickest[key] = min(cost, quickest.get(key, math.inf))


def walk(state: State, name: str, tokens: list[int], masks: dict[Any, float], accepts: dict[Any, float]) -> None:
    for index, token in enumerate(tokens):
        keep(masks, (name, index), elapsed(state.mask, 1e6)[1])
        allowed, cost = elapsed(lambda token=token: state.accept(token), 1e6)
        assert allowed, f"{name}: token {token} was not allowed"
        keep(accepts, (name, index), cost)
    assert state.complete(), name


def costs(names: list[str], tokens: list[bytes], encode: Encode, rounds: int) -> dict[str, Costs]:
    """All outputs under their schemas, the libraries in turns; the end token is the last of ``tokens``."""
    schemas = {case.name: case.schema for case in SCHEMAS}
    steps = {name: encode(written(output)) for name, output in OUTPUTS.items()}
    assert all(is_valid(schemas[name], written(output)) for name, output in OUTPUTS.items())
    measured = {name: Costs() for name in names}
    for _ in range(rounds):
        for name, this in measured.items():
            importlib.import_module(name)
            library, cost = elapsed(lambda name=name: LIBRARIES[name](tokens, encode), 1e3)
            this.setup = min(this.setup, cost)
            for output, ids in steps.items():
                start, cost = elapsed(lambda made=library, output=output: made.compile(schemas[output]), 1e3)
                keep(this.compile, output, cost)
                walk(start.copy(), output, ids, this.first, {})
                state, cost = elapsed(start.copy, 1e3)
                keep(this.copy, output, cost)
                walk(state, output, ids, this.later, this.accept)
    return measured


def cost_table(measured: dict[str, Costs]) -> str:
    def spread(values: Iterable[float]) -> str:
        ordered = sorted(values)
        return f"{statistics.median(ordered):,.0f} / {ordered[int(len(ordered) * 0.99)]:,.0f} / {ordered[-1]:,.0f}"

    lines: dict[str, Callable[[Costs], str]] = {
        "mask, first request of a schema: median / p99 / max µs": lambda c: spread(c.first.values()),
        "mask, later requests: median / p99 / max µs": lambda c: spread(c.later.values()),
        "accepting a token: median / p99 / max µs": lambda c: spread(c.accept.values()),
        "compiling a schema, ms": lambda c: ", ".join(f"{name} {cost:,.1f}" for name, cost in c.compile.items()),
        "copying a state: median ms": lambda c: f"{statistics.median(c.copy.values()):.3f}",
        "setting up the tokenizer, ms": lambda c: f"{c.setup:,.0f}",
    }
    return table(["", *measured], [[title, *(show(c) for c in measured.values())] for title, show in lines.items()])


def imports(names: list[str], rounds: int) -> str:
    """What an import costs in a new process, and which heavy packages come with it."""
    rows = []
    for name in names:
        code = (
            f"import sys, time; t = time.perf_counter(); {_LOADS[name]}; t = time.perf_counter() - t; import resource;"
            "memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
            f"print(t, memory, *(m for m in {_HEAVY!r} if m in sys.modules))"
        )
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            for _ in range(rounds)
        ]
        seconds = min(float(run.stdout.split()[0]) for run in runs)
        _, memory, *heavy = runs[-1].stdout.split()
        needs = ", ".join(each for each in importlib.metadata.requires(name) or [] if "extra" not in each)
        rows.append(
            [name, f"{seconds * 1e3:,.0f}", f"{int(memory) // 1024}", ", ".join(heavy) or "none", needs or "nothing"]
        )
    return table(["import", "ms", "MB resident", "of the heavy packages it loads", "it requires"], rows)


# -- (d) the state -------------------------------------------------------------------------------------------------


def states(libraries: list[LLGuidance | XGrammar], encode: Encode) -> str:
    """Copies, rollbacks and replays, judged by the bits of the masks at every step of every output."""
    schemas = {case.name: case.schema for case in SCHEMAS}
    rows: dict[str, list[str]] = {
        "a copy goes its own way": [],
        "rolled back by 5 tokens": [],
        "replayed in a new matcher": [],
    }
    for library in libraries:
        same = dict.fromkeys(rows, 0)
        steps = 0
        for name, output in OUTPUTS.items():
            tokens, state, again = (
                encode(written(output)),
                library.compile(schemas[name]),
                library.compile(schemas[name]),
            )
            masks, copies = [], []
            for token in tokens:
                masks.append(bytes(state.mask()))
                copies.append(state.copy())
                state.accept(token)
            for index, token in enumerate(tokens):
                steps += 1
                same["a copy goes its own way"] += bytes(copies[index].mask()) == masks[index]
                same["replayed in a new matcher"] += bytes(again.mask()) == masks[index]
                again.accept(token)
                back = min(index, 5)
                rolled = copies[index]
                rolled.rollback(back)
                same["rolled back by 5 tokens"] += bytes(rolled.mask()) == masks[index - back]
        for title in rows:
            rows[title].append(f"{same[title]} of {steps} masks the same")
    names = [library.name for library in libraries]
    return table(["state", *names], [[title, *found] for title, found in rows.items()])


# -- the command ---------------------------------------------------------------------------------------------------


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |" for line in lines)


def main() -> int:
    options = _parser().parse_args()
    names = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    for name in LIBRARIES:
        if name not in names:
            print(f"{name}: left out, not installed (pip install {name})")
    if not names or not options.tokenizer.is_file():
        missing = "neither library is installed" if not names else f"there is no {options.tokenizer}: give --tokenizer"
        print(f"grammar_libraries: {missing}", file=sys.stderr)
        return 2
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    tokens = token_bytes(tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    print(
        ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
        f"on Python {sys.version.split()[0]}\n",
    )
    print(f"{imports(names, options.rounds)}\n")
    count = sum(len(encode(written(output))) for output in OUTPUTS.values())
    for title, vocabulary in {
        f"{len(tokens):,} tokens, the tokenizer's": tokens,
        f"{LARGE:,} tokens, synthetic: the same, filled up with pairs of them": padded(tokens, LARGE),
    }.items():
        print(f"Vocabulary of {title}; {len(OUTPUTS)} outputs of {count} tokens, {options.rounds} rounds\n")
        print(f"{cost_table(costs(names, vocabulary, encode, options.rounds))}\n", flush=True)
    libraries = [LIBRARIES[name](tokens, encode) for name in names]
    print(f"{states(libraries, encode)}\n\n{correctness(libraries, encode)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    home = Path(os.environ.get("FOREWORD_HOME", Path.home() / ".cache" / "foreword"))
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.grammar_libraries", description=__doc__)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=home / "models" / "smollm2-135m" / "tokenizer.json",
        help="of a byte-level tokenizer (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
