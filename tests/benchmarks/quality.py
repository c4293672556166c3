"""``python -m tests.benchmarks.quality``: what each quantisation costs in quality, on real English text.

The text is the language reference that ships inside CPython (``pydoc_data.topics``), so nothing is downloaded.
Perplexity and agreement are teacher-forced: every scheme sees the same text, and at every position its most likely
next token is compared with the one that bfloat16 weights give. The greedy column continues prompts freely and counts
how many tokens agree before the first that differs; there, near ties decide early.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from foreword import Engine, SamplingParams
from foreword.core.outputs import TokenLogprobs

SCHEMES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
REFERENCE = "bfloat16"
WINDOW = 512
"""Tokens of a piece of text that is judged by itself."""


@dataclass
class Measured:
    """What one scheme gave: per text token the log-probability (nats) and the most likely token; and continuations."""

    logprobs: list[float]
    best: list[int]
    continuations: list[list[int]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        perplexity: exp of the mean negative log-probability per token.
        agreement: share of positions whose most likely token is the reference's.
        deviation: mean absolute difference of the text's log-probabilities from the reference's, in nats.
        greedy: mean number of continued tokens that agree with the reference's before the first that differs.
    """

    scheme: str
    perplexity: float
    agreement: float
    deviation: float
    greedy: float


def english_text() -> str:
    """About 460,000 characters of prose about Python, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def measure(model: str, options: dict[str, object], tokens: int, prompts: int, length: int) -> Measured:
    """Run one scheme over ``tokens`` tokens of text and ``prompts`` greedy continuations of ``length`` tokens."""
    with Engine(model, enable_prefix_caching=False, **options) as engine:  # type: ignore[arg-type]
        ids = engine.encode(english_text())
        stride = max(WINDOW, (len(ids) - WINDOW) // max(1, tokens // WINDOW))
        pieces = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW, stride)][: tokens // WINDOW]
        entries: list[tuple[TokenLogprobs, int]] = []
        for number, piece in enumerate(pieces, 1):
            output = engine.generate(piece, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
            rows = output.prompt_logprobs or []
            entries += [(entry, token) for entry, token in zip(rows, piece, strict=True) if entry is not None]
            print(f"\r{number} of {len(pieces)} pieces", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        outputs = engine.generate([piece[:128] for piece in pieces[:prompts]], greedy)
    return Measured(
        [entry[token] for entry, token in entries],
        [max(entry, key=lambda token: entry[token]) for entry, _ in entries],
        [list(output.token_ids) for output in outputs],
    )


def compare(scheme: str, measured: Measured, reference: Measured) -> Row:
    pairs = list(zip(measured.logprobs, reference.logprobs, strict=True))
    same = sum(a == b for a, b in zip(measured.best, reference.best, strict=True))
    runs = [agreeing(*both) for both in zip(measured.continuations, reference.continuations, strict=True)]
    return Row(
        scheme,
        math.exp(-sum(measured.logprobs) / len(pairs)),
        same / len(measured.best),
        sum(abs(a - b) for a, b in pairs) / len(pairs),
        sum(runs) / len(runs),
    )


def agreeing(one: list[int], two: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def render(rows: list[Row], tokens: int, length: int) -> str:
    lines = [
        f"| scheme | perplexity ({tokens:,} tokens) | same most likely token | mean difference, nats | "
        f"greedy tokens before the first other one (of {length}) |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row.scheme} | {row.perplexity:.3f} | {row.agreement:.2%} | {row.deviation:.4f} | {row.greedy:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=20_480, help="tokens of text (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="greedy continuations (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of each (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = {}
    for scheme, engine_options in SCHEMES.items():
        print(f"{scheme}:", file=sys.stderr)
        measured[scheme] = measure(options.model, dict(engine_options), options.tokens, options.prompts, options.length)
    rows = [compare(scheme, each, measured[REFERENCE]) for scheme, each in measured.items()]
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(render(rows, len(measured[REFERENCE].best), options.length))
    return 0


if __name__ == "__main__":
    sys.exit(main())
