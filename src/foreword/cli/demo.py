"""``foreword demo``: many questions over one document, and what they shared."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path
from typing import Any

from foreword.cli.options import add_engine_options, open_engine
from foreword.cli.report import UsageTable

_QUESTIONS = (
    "Who delivered the Gettysburg Address?",
    "When was the Gettysburg Address delivered?",
    "Where was the cemetery dedicated?",
    "To which proposition was the nation dedicated?",
    "What kind of war were they engaged in?",
    "Who consecrated the ground?",
    "What shall not perish from the earth?",
    "Which city is the capital of Japan?",
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="ask questions over one document and see what was reused",
        description="Asks questions over one document: the first alone, the rest as one batch. "
        "Its table shows that the document was computed once.",
    )
    parser.add_argument("--document", type=Path, help="a text file of your own (default: the Gettysburg Address)")
    parser.add_argument("--question", action="append", help="your own question; may be repeated")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    document = options.document.read_text() if options.document else (files(__package__) / "document.txt").read_text()
    if not document.strip():
        raise ValueError(f"{options.document} is empty: give a text to ask about")
    questions = options.question or _QUESTIONS
    system = f"Answer in one short sentence, from this document.\n\n{document}"
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": q}] for q in questions]
    table = UsageTable()
    with open_engine(options) as engine:
        outputs = engine.chat(chats[:1], temperature=0, max_tokens=48)
        if chats[1:]:
            outputs += engine.chat(chats[1:], temperature=0, max_tokens=48)
    for question, output in zip(questions, outputs, strict=True):
        print(f"\n{question}\n  {output.text.strip()}")
        table.add(question, output.usage)
    print(f"\n{table}")
