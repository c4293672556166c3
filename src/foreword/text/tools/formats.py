"""Which tool-call format a chat template speaks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from foreword.text.tools.base import ToolFormat
from foreword.text.tools.hermes import GenericFormat, HermesFormat
from foreword.text.tools.probe import describes_tools

if TYPE_CHECKING:
    from foreword.text.chat import ChatTemplate

__all__ = ["ToolFormat", "recognise"]

_HERMES = re.compile(r'<tool_call>(\s*)\{"name": ".*?\}(\s*)</tool_call>(?:(\s*)<tool_call>)?', re.DOTALL)


def recognise(template: ChatTemplate) -> ToolFormat:
    """The format of the calls that ``template`` shows; the generic one where it shows none, or none that is known.

    A template counts as knowing a format if it describes the tools on offer. Its calls are then looked for in a
    conversation with calls; if it renders none, in its description.
    """
    described = describes_tools(template)
    if not described:
        return GenericFormat()
    turns = template.tool_turns(True)
    shown = turns.shown if turns.native else described
    parallel = turns.several or not turns.native
    if hermes := _HERMES.search(shown):
        before, after, between = hermes.groups()
        return HermesFormat(parallel, before, after, between or "\n")
    return GenericFormat()
