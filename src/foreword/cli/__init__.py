"""The ``foreword`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from foreword import __version__
from foreword.core.errors import ForewordError

_EPILOG = """\
examples:
  foreword demo                                  eight questions over one document, and what was reused
  foreword chat --system "You are a pirate."     talk; every turn shows how much of the prompt was cached
  foreword generate "Once upon a time" -n 3 --max-tokens 40
  echo "Why is the sky blue?" | foreword generate --chat -
  foreword explain monday.json tuesday.json      why a prompt reuses no more of another one
  foreword models                                which names work, and where the weights lie
  foreword bench --workloads W1,W4               how fast the model is on this machine
  foreword cache replay trace.jsonl              what each eviction policy would have reused

Weights are kept under FOREWORD_HOME, by default the user's cache directory.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 1 with a one-line message, or 130 when interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    try:
        return int(options.run(options) or 0)
    except BrokenPipeError:
        return 0
    except (ForewordError, ValueError, OSError) as error:
        print(f"foreword: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from foreword.cli import bench, cache, chat, demo, explain, generate, models

    parser = argparse.ArgumentParser(
        prog="foreword",
        description="An LLM engine inside your Python process that computes every shared beginning once.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"foreword {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (demo, chat, generate, explain, models, bench, cache):
        command.add_parser(commands)
    return parser
