"""``foreword explain``: where a prompt leaves another one, and why."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from foreword.core.explanation import CacheExplanation
    from foreword.text.conversation import Conversations
    from foreword.text.pieces import PromptText
    from foreword.text.tokenizer import Tokenizer

_SHOWN = 16  # tokens of a text that are shown

_EPILOG = """\
A file holds a list of messages, or an object with "messages" and perhaps "tools", as the OpenAI API takes them; any
other file is a plain text prompt.
"""


class _Prompt(NamedTuple):
    text: PromptText
    token_ids: list[int]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="compare two prompts: what the second reuses of the first, and why no more",
        description="Show what would be reused if the first prompt were cached and the second were asked next. "
        "Only the model's tokenizer and chat template are read.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cached", type=Path, help="file of the prompt that is cached")
    parser.add_argument("asked", type=Path, help="file of the prompt that is asked next")
    parser.add_argument("--model", default="smollm2-135m", help="as in the other commands (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the explanation's fields as JSON")
    parser.add_argument(
        "--tools-as-given", action="store_true", help="do not sort the tools, as with canonical_tools=False"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from foreword.text.conversation import Conversations

    files = [_read(path) for path in (options.cached, options.asked)]  # before a model is looked for
    tokenizer = _tokenizer(options.model)
    conversations = Conversations(tokenizer)
    prompts = []
    for path, given in zip((options.cached, options.asked), files, strict=True):
        try:
            prompts.append(_prompt(given, conversations, canonical=not options.tools_as_given))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    explanation = _explain(prompts[0], prompts[1], tokenizer)
    print(json.dumps(explanation.to_dict(), ensure_ascii=False, indent=2) if options.json else explanation)


def _read(path: Path) -> str | dict[str, Any]:
    """A text, or an object with ``messages``.

    Raises:
        ValueError: the file cannot be read, is empty, or is JSON that is no conversation.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    if not text:
        raise ValueError(f"{path} is empty: give messages or a text")
    is_json = path.suffix.lower() == ".json"
    try:
        value = json.loads(text)
    except ValueError as error:
        if is_json:
            raise ValueError(f"{path} is no JSON: {error}; name a text prompt otherwise, .txt say") from error
        return text
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {"messages": value}
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value
    if is_json:
        raise ValueError(
            f'{path} holds no conversation: give a list of messages, or {{"messages": [...], "tools": [...]}}'
        )
    return text


def _tokenizer(model: str) -> Tokenizer:
    from foreword.model.source import resolve
    from foreword.text.tokenizer import Tokenizer

    directory = Path(model).expanduser()  # with a tokenizer alone it is no checkpoint, but all that is needed
    return Tokenizer.from_directory(directory if directory.is_dir() else resolve(model).directory)


def _prompt(given: str | dict[str, Any], conversations: Conversations, *, canonical: bool) -> _Prompt:
    from foreword.core.sampling import SamplingParams
    from foreword.text.conversation import ChatOptions
    from foreword.text.pieces import locate, plain

    if isinstance(given, str):
        return _Prompt(plain(given), conversations.tokenizer.encode(given))
    options = ChatOptions(tools=given.get("tools") or None, canonical_tools=canonical)
    params = options.constrain(SamplingParams())  # refuses tools that are none
    rendered = conversations.render(given["messages"], options, params)
    return _Prompt(locate(rendered, given["messages"]), rendered.token_ids)


def _explain(cached: _Prompt, asked: _Prompt, tokenizer: Tokenizer) -> CacheExplanation:
    from foreword.core.explanation import CacheExplanation
    from foreword.text.causes import compare

    pairs = enumerate(zip(cached.token_ids, asked.token_ids, strict=False))
    shorter = min(len(cached.token_ids), len(asked.token_ids))
    matched = next((at for at, (first, second) in pairs if first != second), shorter)
    total = len(asked.token_ids)
    if matched == total:
        return CacheExplanation(total, matched, "complete")

    def shown(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    found = compare(cached.text, asked.text)
    behind = len(asked.text.text) - found.offset
    return CacheExplanation(
        prompt_tokens=total,
        matched_tokens=matched,
        reason="diverged" if matched < len(cached.token_ids) else "never_seen",
        position=matched,
        piece=found.piece or asked.text.owner(found.offset),
        expected_text=shown(cached.token_ids[matched:][:_SHOWN]),
        actual_text=shown(asked.token_ids[matched:][:_SHOWN]),
        before_text=shown(asked.token_ids[:matched][-_SHOWN:]),
        cause=found.cause,
        lost_tokens=round((total - matched) * found.lost_characters / behind) if behind else 0,
        reusable_share=found.reusable_share,
    )
