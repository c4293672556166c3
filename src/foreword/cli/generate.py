"""``foreword generate``: one prompt in, text out."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from foreword.cli.options import add_engine_options, add_sampling_options, open_engine, sampling
from foreword.cli.report import summary


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete a text, or answer one question",
        description="Complete a text as it stands, or with --chat answer it through the model's chat template.",
    )
    parser.add_argument("prompt", help='the text; "-" reads it from standard input')
    parser.add_argument("-n", type=int, default=1, help="completions that share the prompt's KV (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="treat the prompt as a user's message")
    parser.add_argument("--usage", action="store_true", help="print what it cost on standard error")
    add_engine_options(parser)
    add_sampling_options(parser, temperature=None, default="0, or 0.8 with -n above 1")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    prompt = sys.stdin.read().strip() if options.prompt == "-" else options.prompt
    if options.temperature is None:
        options.temperature = 0.8 if options.n > 1 else 0.0
    with open_engine(options) as engine:
        if options.chat:
            chunks = engine.stream_chat([{"role": "user", "content": prompt}], n=options.n, **sampling(options))
        else:
            chunks = engine.stream(prompt, n=options.n, **sampling(options))
        output = None
        for chunk in chunks:
            if options.n == 1:
                print(chunk.text, end="", flush=True)
            output = chunk.output or output
        assert output is not None
        print("" if options.n == 1 else "\n---\n".join(completion.text for completion in output.outputs))
        if options.usage:
            print(summary(output.usage), file=sys.stderr)
