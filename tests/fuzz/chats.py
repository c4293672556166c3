"""Conversations: a chat template for the tiny model, and turns that go on where earlier answers ended."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from support import TINY_EOS

_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<model>' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
_MERGES = (("a", "b"), ("b", "a"), ("a", "a"))
_SYSTEMS = ("", "abab", "be brief, a", "be brief, b", "answer in one word of few letters")
_QUESTIONS = ("a", "b?", "aabb", "and then?", "bab")
_LETTERS = dict.fromkeys((*range(1, 1 + len(_MERGES)), ord("a"), ord("b")), 9.0) | {TINY_EOS: 7.0}


def save_chat_model(source: Path, directory: Path) -> Path:
    """A copy of the tiny llama that can chat.

    Its template shows tools and calls in few tokens. Three bytes that no text holds spell pairs of letters instead: the
    model may write a text in other tokens than those it is encoded in.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True)
    options = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(options | {"chat_template": _TEMPLATE}))
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = {token: name for name, token in tokenizer["model"]["vocab"].items()}
    names |= {1 + rank: a + b for rank, (a, b) in enumerate(_MERGES)}
    tokenizer["model"] |= {"vocab": {name: token for token, name in names.items()}, "merges": list(map(list, _MERGES))}
    file.write_text(json.dumps(tokenizer))
    return directory


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


_TOOLS = (_tool("f"), _tool("go"))


@dataclass(frozen=True, eq=False)
class Turn:
    """A conversation that awaits an answer. What it shares with :class:`cases.Case` is named alike.

    Attributes:
        options: of the conversation, by name.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    seed: int
    max_tokens: int
    n: int

    kind = "chat"

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of ``SamplingParams`` that decide what comes out."""
        bias = {} if self.options.get("tool_choice") == "any" else {"logit_bias": _LETTERS}
        return {"temperature": 1.0, "seed": self.seed, "max_tokens": self.max_tokens, "n": self.n, **bias}

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What, with the tokens of its prompt, decides over the answer."""
        tools = [tool["function"]["name"] for tool in self.options.get("tools") or ()]
        return (tuple(tools), self.options.get("tool_choice"), self.seed, self.max_tokens, self.n)

    def __str__(self) -> str:
        shown = [f"{message['role']}: {message['content']}" for message in self.messages]
        return f"chat {shown}, {self.key}, replay_turns={self.options['replay_turns']}"


def draw_turn(rng: random.Random, earlier: Turn | None = None, answer: dict[str, Any] | None = None) -> Turn:
    """A conversation, or the next turn of ``earlier`` behind the message ``answer``."""
    question = {"role": "user", "content": rng.choice(_QUESTIONS)}
    seed, replay, n = rng.randrange(3), rng.random() < 0.8, rng.choice((1, 1, 1, 1, 2))
    if earlier is not None and answer is not None:
        messages = [*(dict(message) for message in earlier.messages), answer, question]
        return Turn(messages, earlier.options | {"replay_turns": replay}, seed, rng.choice((1, 2, 4)), n)
    system = rng.choice(_SYSTEMS)
    messages = [{"role": "system", "content": system}, question] if system else [question]
    options: dict[str, Any] = {"replay_turns": replay}
    tools = rng.choice((0, 0, 0, 1, 2))
    if tools:
        choice = rng.choice(("auto", "auto", "none", "any"))
        options |= {"tools": rng.sample(_TOOLS, tools), "tool_choice": choice}
        if choice == "any":
            return Turn(messages, options, seed, rng.choice((5, 70)), 1)
    return Turn(messages, options, seed, rng.choice((2, 4, 6)), n)
