"""What a chat template makes of tools, found out by rendering tiny conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.text.chat import ChatTemplate

_ID = "call00001"
_LONG_ID = "call_probe_00001"
_TOOL = {
    "type": "function",
    "function": {
        "name": "delta_tool",  # not the name of the probing calls, which are looked for in the same text
        "description": "delta",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "delta"}},
            "required": ["key"],
        },
    },
}
_USER: dict[str, Any] = {"role": "user", "content": "alpha"}


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """How a template takes the turns of a conversation in which tools were called.

    Attributes:
        native: it renders calls and results; where it does not, the rest means nothing.
        arguments_as_text: it takes arguments as JSON text, not as an object.
        several: it takes several calls in one message.
        short_ids: ids must be 9 letters and digits.
        content: where text that an assistant wrote before its calls can stand: "beside" them in one message, in a
            message "before" theirs, or nowhere ("").
        user_after_tool: a user's turn may follow a result.
        user_first: the first turn is taken for a user's, whoever's it is.
        shown: the conversation with one call (two, if it takes several) as rendered.
    """

    native: bool
    arguments_as_text: bool = False
    several: bool = False
    short_ids: bool = False
    content: str = ""
    user_after_tool: bool = False
    user_first: bool = False
    shown: str = ""


def describes_tools(template: ChatTemplate) -> str:
    """The text of a conversation with a tool on offer, "" if the template does not mention the tool in it."""
    text = _Probe(template, True).text([_USER]) or ""
    return text if "delta_tool" in text else ""


def tool_turns(template: ChatTemplate, with_tools: bool) -> ToolTurns:
    """What ``template`` can do, ``with_tools`` on offer or without."""
    probe = _Probe(template, with_tools)
    one = {as_text: probe.text(probe.turns(1, as_text)) or "" for as_text in (False, True)}
    as_text = not _complete(one[False], 1) or "'key'" in one[False]  # an object that is printed as Python's
    if not _complete(one[as_text], 1):
        return ToolTurns(native=False)
    two = probe.text(probe.turns(2, as_text)) or ""
    several = _complete(two, 2)
    long_ids = probe.text(probe.turns(1, as_text, call_id=_LONG_ID)) or ""
    user_first = probe.text([{"role": "assistant", "content": "alpha"}]) == probe.text([_USER])
    after = [*probe.turns(1, as_text), {"role": "user", "content": "theta"}]
    return ToolTurns(
        native=True,
        arguments_as_text=as_text,
        several=several,
        short_ids=not _complete(long_ids, 1) or ("00001" in long_ids and _LONG_ID not in long_ids),
        content=probe.place_of_content(as_text),
        user_after_tool="theta" in (probe.text(after) or ""),
        user_first=user_first,
        shown=two if several else one[as_text],
    )


def _complete(text: str, calls: int) -> bool:
    names = ("beta_tool", "gamma_tool")[:calls]
    return "value" in text and all(name in text and f"{name} result" in text for name in names)


class _Probe:
    def __init__(self, template: ChatTemplate, with_tools: bool) -> None:
        self._template = template
        self._tools: Sequence[Mapping[str, Any]] | None = [_TOOL] if with_tools else None

    def text(self, messages: list[dict[str, Any]]) -> str | None:
        """``messages`` as rendered; None if the template refuses them."""
        if not self._template.abilities.text_content:
            parts = [[{"type": "text", "text": message["content"]}] for message in messages]
            messages = [message | {"content": part} for message, part in zip(messages, parts, strict=True)]
        try:
            return self._template.render(messages, self._tools)
        except ValueError:
            return None

    def turns(self, calls: int, as_text: bool, *, content: str = "", call_id: str = _ID) -> list[dict[str, Any]]:
        """A question, calls and their results."""
        arguments: Any = '{"key": "value"}' if as_text else {"key": "value"}
        ids = [call_id, call_id[:-1] + "2"]
        names = ("beta_tool", "gamma_tool")[:calls]
        made = [
            {"id": given, "type": "function", "function": {"name": name, "arguments": arguments}}
            for given, name in zip(ids, names, strict=False)
        ]
        results = [
            {"role": "tool", "content": f"{name} result", "name": name, "tool_call_id": given}
            for given, name in zip(ids, names, strict=False)
        ]
        return [_USER, {"role": "assistant", "content": content, "tool_calls": made}, *results]

    def place_of_content(self, as_text: bool) -> str:
        end = {"role": "assistant", "content": "omega"}
        beside = [*self.turns(1, as_text, content="kappa"), end]
        user, calls, *rest = self.turns(1, as_text)
        before = [user, {"role": "assistant", "content": "kappa"}, calls, *rest, end]
        for place, messages in (("beside", beside), ("before", before)):
            text = self.text(messages) or ""
            if "kappa" in text and "omega" in text:
                return place
        return ""
