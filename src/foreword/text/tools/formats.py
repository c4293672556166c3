"""Which tool-call format a chat template speaks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from foreword.text.tools.base import ToolFormat
from foreword.text.tools.gemma import Gemma4Format, GemmaFormat
from foreword.text.tools.hermes import GenericFormat, HermesFormat
from foreword.text.tools.llama3 import Llama3Format
from foreword.text.tools.mistral import MistralArgsFormat, MistralFormat
from foreword.text.tools.probe import describes_tools

if TYPE_CHECKING:
    from foreword.text.chat import ChatTemplate

__all__ = ["ToolFormat", "recognise"]

_HERMES = r'<tool_call>(\s*)\{"name": %s.*?\}(\s*)</tool_call>(?:(\s*)<tool_call>)?'
_MISTRAL = re.compile(r'\[TOOL_CALLS\](\s*)\[\{"name"')
_MISTRAL_ARGS = re.compile(r"\[TOOL_CALLS\]beta_tool(\[CALL_ID\]\w*)?\[ARGS\]\{")
_LLAMA3 = re.compile(r'\{"name": ?"beta_tool", ?"parameters": ?\{"key": ?"value"\}\}')


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
    if hermes := re.search(_HERMES % ('"beta_tool"' if turns.native else ""), shown, re.DOTALL):
        before, after, between = hermes.groups()
        return HermesFormat(parallel, before, after, between or "\n")
    if mistral := _MISTRAL.search(shown):
        return MistralFormat(parallel, mistral[1])
    if mistral := _MISTRAL_ARGS.search(shown):
        return MistralArgsFormat(parallel, with_id=mistral[1] is not None)
    for gemma in (GemmaFormat, Gemma4Format):
        if f"{gemma.opener}call:beta_tool{{" in shown:
            return gemma(parallel)
    if _LLAMA3.search(shown):
        return Llama3Format(parallel and turns.native)
    return GenericFormat()
