"""Reasoning models: telling what was thought from what was answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foreword.core.message import MessageDelta
from foreword.text.tools.parser import held_back

START, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """That a chat template knows ``<think>`` sections.

    Attributes:
        opened: the prompt itself ends with the opening tag, so that the answer starts with a thought.
    """

    opened: bool = False

    def grammar(self, answer: str, literal: Callable[[str], str]) -> str:
        """Lark rules: an optional thought (one for certain, if it was opened) before the rule ``answer``.

        ``literal`` gives the Lark source of a tag: a quoted string, or ``<[id]>`` for a special token.
        """
        begin = "" if self.opened else f"{literal(START)} "
        start = f"thought {answer}" if self.opened else f"{answer} | thought {answer}"
        spelled = "thinking[lazy]: /(.|\\n)*<\\/think>/\n"  # the first closing tag ends the thought
        marker = literal(END)
        if marker.startswith("<"):
            spelled += f"free: /(.|\\n)*/\nthinking_on: free {marker}\n"
        end = "(thinking | thinking_on)" if marker.startswith("<") else "thinking"
        return f'start: {start}\nthought: {begin}{end} ("\\n" | "\\n\\n")?\n{spelled}'


def recognise(template_source: str, prompt: str) -> Reasoning | None:
    """What the chat template and the ``prompt`` it rendered say about thinking; None where no thought is expected."""
    if END not in template_source:
        return None
    end = prompt.rstrip()
    if end.endswith(END):  # an empty thought, written by the template: thinking is switched off
        return None
    return Reasoning(opened=end.endswith(START))


class ReasoningParser:
    """Splits an answer as it streams. Only a thought at its very start is one; later tags are text.

    White space around the thought belongs to the markup and is dropped.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._held = ""  # text that is not yet known to be one or the other
        self._state = "thinking" if reasoning.opened else "before"
        self._any = False  # of the thought has been shown

    def append(self, text: str) -> MessageDelta:
        """What ``text`` adds: reasoning, content, or nothing yet."""
        if self._state == "content":
            return MessageDelta(content=text)
        self._held += text
        if self._state == "before":
            begun = self._held.lstrip()
            if begun.startswith(START):
                self._state, self._held = "thinking", begun.removeprefix(START)
            elif START.startswith(begun):
                return MessageDelta()
            else:
                return self._content(self._held)
        if self._state == "after":
            return self._after("")
        return self._thinking()

    def finish(self) -> MessageDelta:
        """The text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return MessageDelta(reasoning=held.rstrip()) if self._state == "thinking" else MessageDelta(content=held)

    def _thinking(self) -> MessageDelta:
        if not self._any:
            self._held = self._held.lstrip()
        thought, found, rest = self._held.partition(END)
        if found:
            self._state, self._held = "after", rest
            return self._after(thought.rstrip())
        # white space may turn out to be the last of the thought, and a beginning of the tag the tag
        end = len(self._held[: len(self._held) - held_back(self._held, 0, END)].rstrip())
        thought, self._held = self._held[:end], self._held[end:]
        self._any = self._any or bool(thought)
        return MessageDelta(reasoning=thought)

    def _after(self, thought: str) -> MessageDelta:
        """Behind the thought: the answer begins with the first character that is no white space."""
        content = self._held.lstrip()
        if not content:
            self._held = ""
            return MessageDelta(reasoning=thought)
        return MessageDelta(reasoning=thought, content=self._content(content).content)

    def _content(self, text: str) -> MessageDelta:
        self._state, self._held = "content", ""
        return MessageDelta(content=text)
