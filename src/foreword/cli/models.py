"""``foreword models``: which names resolve, and where the weights lie."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "models",
        help="list the models that can be used by name",
        description="The models that can be used by name, and where their weights lie. "
        "A checkpoint directory, a .gguf file or a hub repository works in the same place as a name.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    from foreword.model.source import home, known_models

    for model in known_models():
        print(f"{model.name:16} {model.description}")
        print(f"{'':16} {model.location or f'not here yet; {model.size_bytes / 1e6:.0f} MB are fetched on first use'}")
    print(f"\nweights are kept under {home()}")
