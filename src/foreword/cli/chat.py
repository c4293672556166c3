"""``foreword chat``: an interactive conversation that shows what each turn reused."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from foreword.cli.options import add_engine_options, add_sampling_options, open_engine, sampling
from foreword.cli.report import summary
from foreword.core.errors import PromptTooLongError

if TYPE_CHECKING:
    from foreword import Engine


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. Ctrl-C stops an answer; an empty line or Ctrl-D ends; /reset starts over.",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_engine_options(parser)
    add_sampling_options(parser, temperature=0.7, default="0.7")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    opening = [{"role": "system", "content": options.system}] if options.system else []
    with open_engine(options) as engine:
        print("Ctrl-C stops an answer; an empty line ends; /reset starts over.", file=sys.stderr)
        messages = list(opening)
        while (text := _read_line()) is not None:
            if text == "/reset":
                messages = list(opening)
                print("starting over", file=sys.stderr)
                continue
            messages.append({"role": "user", "content": text})
            answer = _answer(engine, messages, sampling(options))
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    try:
        return input("\n> ").strip() or None
    except EOFError:
        return None


def _answer(engine: Engine, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """Print the answer as it comes, then what it cost; None if the conversation no longer fits."""
    pieces: list[str] = []
    try:
        stream = engine.stream_chat(messages, **options)
    except PromptTooLongError as error:
        print(f"foreword: {error}; /reset starts over", file=sys.stderr)
        return None
    try:
        for chunk in stream:
            pieces.append(chunk.text)
            print(chunk.text, end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{_dim(summary(chunk.usage))}", end="")
    except KeyboardInterrupt:
        stream.close()
    print()
    return "".join(pieces)


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text
