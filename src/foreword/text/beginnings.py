"""Beginnings of conversations: the part of a prompt that does not depend on how the conversation goes on."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from foreword.core.sampling import SamplingParams
from foreword.text.chat import Message, check_messages
from foreword.text.conversation import ChatOptions, Conversations, Rendered
from foreword.text.pieces import common_prefix, locate, marked
from foreword.text.tokenizer import Tokenizer


class Keep(NamedTuple):
    """The first tokens of a prompt that are to be kept, and for how many seconds."""

    num_tokens: int
    ttl_s: float


def beginning(
    conversations: Conversations, messages: Sequence[Message], options: ChatOptions, params: SamplingParams
) -> Rendered:
    """What the prompts have in common that go on from ``messages``, in whole tokens.

    Behind a message of the user or a tool the assistant speaks: what the template puts before its answer is left out.
    Behind others a user speaks, and two renderings that differ in what is said show how far the prompt is the same: a
    template may merge both messages, fold a system prompt into the user's, or leave out earlier thoughts.

    Raises:
        ValueError: as :meth:`Conversations.render`.
    """
    checked = check_messages(messages)
    if checked[-1]["role"] in ("user", "tool"):
        rendered = conversations.render(messages, options, params)
        other = conversations.text_of(checked, options, params, speaks_next=False)
    else:
        rendered = conversations.render([*messages, {"role": "user", "content": "A"}], options, params)
        other = conversations.text_of([*checked, {"role": "user", "content": "B"}], options, params)
    end = common_prefix(rendered.text, other)
    count = tokens_before(end, rendered)
    return dataclasses.replace(
        rendered, messages=checked, text=rendered.text[:end], token_ids=rendered.token_ids[:count], points=()
    )


def kept(rendered: Rendered) -> list[Keep]:
    """What the cache points of a conversation ask for. A point whose place the prompt does not show is left out."""
    inside = []
    for point in rendered.points:
        if point.message is not None:
            content = rendered.messages[point.message]["content"]
            first, last = len(content) - len(content.lstrip()), len(content.rstrip())  # templates trim
            inside.append((point.message, max(min(point.offset, last), min(first, last))))
    offsets = marked(rendered, inside)
    tools = [each for each in locate(rendered).pieces if each.piece.kind == "tools"] if rendered.options.points else []
    found, number = [], -1
    for point in rendered.points:
        if point.message is None:  # shown in another order, perhaps
            offset = max(
                (end for (_, index, _), _, end in tools if index is not None and index <= point.offset), default=0
            )
        else:
            number += 1
            offset = offsets.get(number, 0)
        count = tokens_before(offset, rendered)
        if count:
            found.append(Keep(count, point.ttl_s))
    return found


def tokens_before(offset: int, rendered: Rendered) -> int:
    """How many tokens of a prompt end at or before the character at ``offset`` of its text."""
    ends = token_ends(rendered.token_ids, rendered.conversations.tokenizer)
    start_token = max(ends[-1] - len(rendered.text), 0)  # which the tokenizer adds
    return bisect_right(ends, offset + start_token) if offset else 0


def token_ends(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where each token ends in the text, in characters; one that ends inside a character ends before it."""
    ends, total = [], 0
    for token in token_ids:
        spelled = tokenizer.token_bytes(token, skip_special_tokens=False)
        total += sum(byte & 0xC0 != 0x80 for byte in spelled)  # the first bytes of characters
        ends.append(total)
    return ends
