"""``python -m tests.benchmarks.kv_quality``: what int8 KV costs in quality, and what it saves, beside the default.

The text is that of ``quality.py``. Every engine sees the same pieces, and the logits at every position are compared
with the default's, of bfloat16 KV. float32 KV is the yardstick: what bfloat16 itself costs. Greedy continuations are
free, so that near ties part them early. Of the speed test's runs, which take turns, the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tests.benchmarks.quality import agreeing, english_text
from torch import Tensor

from foreword import Engine, SamplingParams
from foreword.model.load import stored_quantization
from foreword.model.source import resolve

WINDOW = 2048
"""Tokens of a piece of text: at its end attention reads as many of KV."""


@dataclass
class Row:
    """One line of the table, of one KV dtype.

    Attributes:
        perplexity: exp of the mean negative log-probability per token.
        agreement: share of positions whose most likely token is the default's.
        largest, mean: absolute difference of logits from the default's.
        greedy: mean number of continued tokens that agree with the default's before the first that differs.
        bytes_per_token: of KV.
        prefill, decode: tokens per second, at the length of the speed test.
    """

    kv: str
    perplexity: float
    agreement: float
    largest: float
    mean: float
    greedy: float
    bytes_per_token: int
    prefill: float
    decode: float


def schemes(model: str) -> dict[str, dict[str, object]]:
    """Engine options by the name of the KV dtype; the weights are the default's in each."""
    weights = stored_quantization(resolve(model).directory) or "int8"
    return {
        "float32": {"dtype": "float32", "quantization": weights},
        "bfloat16": {"dtype": "bfloat16", "quantization": weights},
        "int8": {"dtype": "bfloat16", "quantization": weights, "kv_cache_dtype": "int8"},
    }


REFERENCE = "bfloat16"


@contextmanager
def recorded(engine: Engine) -> Iterator[list[Tensor]]:
    """All logits that the engine makes."""
    model, made = engine._loop.core.runner.model, list[Tensor]()
    original = model.logits

    def logits(hidden: Tensor) -> Tensor:
        made.append(original(hidden).clone())
        return made[-1]

    model.logits = logits  # type: ignore[method-assign]
    try:
        yield made
    finally:
        del model.logits  # type: ignore[method-assign]


def logits_of(engine: Engine, piece: list[int]) -> Tensor:
    """``[len(piece) - 1, vocabulary]``: behind every token but the last."""
    with recorded(engine) as made:
        engine.generate(piece, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return torch.cat(made)[: len(piece) - 1]


@dataclass
class Sums:
    """Over all positions so far."""

    positions: int = 0
    loss: float = 0.0
    same: int = 0
    largest: float = 0.0
    total: float = 0.0

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        difference = (logits - reference).abs()
        self.positions += len(targets)
        self.loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        self.same += int((logits.argmax(1) == reference.argmax(1)).sum())
        self.largest = max(self.largest, difference.max().item())
        self.total += difference.mean(1).sum().item()


def compare_logits(engines: dict[str, Engine], pieces: list[list[int]]) -> dict[str, Sums]:
    sums = {name: Sums() for name in engines}
    for number, piece in enumerate(pieces, 1):
        reference = logits_of(engines[REFERENCE], piece)
        for name, engine in engines.items():
            logits = reference if name == REFERENCE else logits_of(engine, piece)
            sums[name].add(logits, reference, torch.tensor(piece[1:]))
        print(f"\r{number} of {len(pieces)} pieces", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return sums


def compare_greedy(engines: dict[str, Engine], prompts: list[list[int]], length: int) -> dict[str, float]:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    texts = {name: [o.token_ids for o in engine.generate(prompts, params)] for name, engine in engines.items()}
    pairs = {name: zip(ids, texts[REFERENCE], strict=True) for name, ids in texts.items()}
    return {name: statistics.mean(agreeing(*pair) for pair in both) for name, both in pairs.items()}


def speeds(engines: dict[str, Engine], prompt: list[int], length: int, runs: int) -> dict[str, tuple[float, float]]:
    """Tokens per second: of a cold prefill of ``prompt``, and of ``length`` tokens decoded behind it."""
    one = SamplingParams(temperature=0, max_tokens=1)
    more = SamplingParams(temperature=0, max_tokens=length + 1, ignore_eos=True)
    best = dict.fromkeys(engines, (math.inf, math.inf))
    for _ in range(runs):
        for name, engine in engines.items():
            engine.reset_prefix_cache()
            cold, warm = (timed(engine, prompt, params) for params in (one, more))
            best[name] = (min(best[name][0], cold), min(best[name][1], warm))
    return {name: (len(prompt) / cold, length / warm) for name, (cold, warm) in best.items()}


def timed(engine: Engine, prompt: list[int], params: SamplingParams) -> float:
    start = time.perf_counter()
    engine.generate(prompt, params)
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> list[Row]:
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(options.model, kv_cache_memory="1GiB", **each))  # type: ignore[arg-type]
            for name, each in schemes(options.model).items()
        }
        ids = engines[REFERENCE].encode(english_text())
        count = options.tokens // WINDOW
        pieces = [ids[i * len(ids) // count :][:WINDOW] for i in range(count)]
        fast = speeds(engines, ids[: options.context], options.length, options.runs)
        sums = compare_logits(engines, pieces)
        greedy = compare_greedy(engines, [piece[: WINDOW // 2] for piece in pieces[: options.prompts]], options.length)
        return [
            Row(
                name,
                math.exp(s.loss / s.positions),
                s.same / s.positions,
                s.largest,
                s.total / s.positions,
                greedy[name],
                engines[name]._loop.core.runner.pool.geometry.bytes_per_token,
                *fast[name],
            )
            for name, s in sums.items()
        ]


def render(rows: list[Row], options: argparse.Namespace) -> str:
    lines = [
        f"| KV | perplexity ({options.tokens:,} tokens) | same most likely token | logits: largest difference | mean | "
        f"greedy tokens before the first other one (of {options.length}) | bytes a token | tokens in 1 GiB | "
        f"prefill of {options.context:,}, tok/s | decode behind them, tok/s |",
        "| --- |" + " ---: |" * 9,
    ]
    for row in rows:
        lines.append(
            f"| {row.kv} | {row.perplexity:.3f} | {row.agreement:.2%} | {row.largest:.2f} | {row.mean:.4f} | "
            f"{row.greedy:.1f} | {row.bytes_per_token:,} | {2**30 // row.bytes_per_token:,} | {row.prefill:,.0f} | "
            f"{row.decode:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kv_quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=20_480, help="tokens of text (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=10, help="greedy continuations (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of each (default: %(default)s)")
    parser.add_argument(
        "--context", type=int, default=4_096, help="tokens of the speed test's prompt (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=3, help="of the speed test (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(render(rows, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
