"""``foreword cache``: what a recorded trace says about eviction policies and memory."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from foreword.kv.eviction import POLICIES
from foreword.kv.replay import Replayed, pool_sizes, replay, replay_optimum
from foreword.kv.trace import Trace, read_trace

OPTIMUM = "optimum"
_NOTE = """\
Token hit rates, counted in whole blocks, one request after the other; * marks the best policy of a pool size.
"optimum" is Belady's, which knows the future: no policy can do better. "gap" is what the default lacks to it."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("cache", help="replay a recorded trace of the prefix cache")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser(
        "replay",
        help="what each eviction policy would have reused, beside the optimum",
        description="Replays a trace, recorded with Engine(..., cache_trace=PATH), under each eviction policy, and "
        "prints token hit rates beside Belady's optimum.",
    )
    action.add_argument("trace", metavar="TRACE", help="the file; one that ends in .gz is decompressed")
    action.add_argument(
        "--blocks", type=int, nargs="+", metavar="N", help="pool sizes (default: the recorded one, 1/2, 1/4, 1/8 of it)"
    )
    action.add_argument("--json", action="store_true", help="print all numbers as JSON")
    action.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    trace = read_trace(options.trace)
    if not trace.requests:
        raise ValueError(f"{options.trace} holds no request yet")
    results = {size: replay_all(trace, size) for size in pool_sizes(trace, options.blocks)}
    if options.json:
        content = {
            "requests": len(trace.requests),
            "block_size": trace.header.block_size,
            "recorded_blocks": trace.header.num_blocks,
            "pools": [
                {
                    "blocks": size,
                    **{name: {**each._asdict(), "hit_rate": each.hit_rate} for name, each in row.items()},
                }
                for size, row in results.items()
            ],
        }
        json.dump(content, sys.stdout, indent=1)
        print()
    else:
        print(table(trace, results))


def replay_all(trace: Trace, num_blocks: int) -> dict[str, Replayed]:
    """Every policy by name, and the optimum, at one pool size."""
    return {
        **{name: replay(trace, policy, num_blocks) for name, policy in POLICIES.items()},
        OPTIMUM: replay_optimum(trace, num_blocks),
    }


def table(trace: Trace, results: dict[int, dict[str, Replayed]]) -> str:
    """One line per pool size; the first policy is the default."""
    header, default = trace.header, next(iter(POLICIES))
    tokens = sum(request.prompt for request in trace.requests)
    lines = [
        f"{len(trace.requests):,} requests, {tokens:,} prompt tokens, recorded with {header.num_blocks:,} blocks of "
        f"{header.block_size} tokens\n",
        "".join([f"{'blocks':>10}", *(f"{name:>9} " for name in POLICIES), f"{OPTIMUM:>9} ", f"{'gap':>8}"]),
    ]
    for size, row in results.items():
        best = max(row[name].reused_tokens for name in POLICIES)
        cells = [f"{row[name].hit_rate:9.1%}{'*' if row[name].reused_tokens == best else ' '}" for name in POLICIES]
        gap = row[OPTIMUM].hit_rate - row[default].hit_rate
        line = f"{size:>10,}" + "".join(cells) + f"{row[OPTIMUM].hit_rate:9.1%} {100 * gap:8.1f}"
        too_long = row[OPTIMUM].too_long
        lines.append(line + (f"   {too_long} requests do not fit" if too_long else ""))
    return "\n".join([*lines, "", _NOTE])
