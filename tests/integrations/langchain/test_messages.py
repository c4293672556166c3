"""Any conversation a LangChain program holds reaches the model, or is refused clearly (LangChain 8, 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool

from langchain_foreword import ChatForeword
from langchain_foreword._messages import to_dicts

if TYPE_CHECKING:
    from foreword import Engine

CALL = {"name": "add", "args": {"a": 1, "b": 2}, "id": "call-1"}


@pytest.fixture
def llm(engine: Engine) -> ChatForeword:
    return ChatForeword(engine=engine, temperature=0, max_tokens=4)


S, H, A = SystemMessage("Be brief."), HumanMessage("One plus two?"), AIMessage("Three.")
TOOL_TURN = [H, AIMessage("", tool_calls=[CALL]), ToolMessage("3", tool_call_id="call-1", name="add")]


@pytest.mark.parametrize(
    "messages",
    [
        [S, S, H, H, A, A, H],
        [A, H],
        [H, A],
        [S],
        [H, S, H],
        TOOL_TURN,
        [*TOOL_TURN, ToolMessage("4", tool_call_id="call-2"), A, H],
        [ChatMessage("hello", role="user"), ChatMessage("Be brief.", role="developer")],
        [HumanMessage([{"type": "text", "text": "One "}, "plus two?"])],
        [H, AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Three."}]), H],
    ],
)
def test_no_order_of_roles_raises(llm: ChatForeword, messages: list[BaseMessage]) -> None:
    """L16992; L15232: a history that ends in a ToolMessage."""
    message = llm.invoke(messages)
    assert message.usage_metadata["output_tokens"] >= 1
    assert llm.get_num_tokens_from_messages(messages) == message.usage_metadata["input_tokens"]


def test_tool_turns_reach_the_prompt_as_text(llm: ChatForeword) -> None:
    engine = llm.get_engine()
    call = llm.get_num_tokens_from_messages(TOOL_TURN) - llm.get_num_tokens_from_messages([H])
    assert call > len(engine.encode('{"name": "add", "arguments": {"a": 1, "b": 2}}'))
    assert to_dicts(TOOL_TURN)[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call-1", "name": "add"},
    ]


@pytest.mark.parametrize("kind", ["image_url", "audio", "file"])
def test_other_content_blocks_raise_and_are_named(llm: ChatForeword, kind: str) -> None:
    block = {"type": kind, kind: {"url": "https://example.org/x"}, "base64": "eA==", "mime_type": "x/y"}
    with pytest.raises(ValueError, match=r"messages\[1\].*" + kind):
        llm.invoke([S, HumanMessage(["What is this?", block])])


def test_unknown_role_raises(llm: ChatForeword) -> None:
    with pytest.raises(ValueError, match="narrator"):
        llm.invoke([ChatMessage("Once upon a time", role="narrator")])


def test_empty_conversation_raises(llm: ChatForeword) -> None:
    with pytest.raises(ValueError, match="empty"):
        llm.invoke([])


def test_over_length_prompt_raises_a_clear_error(llm: ChatForeword) -> None:
    """I17496."""
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens.*max_model_len=8192"):
        llm.invoke("word " * 9000)


def test_offline_token_counts_are_exact(llm: ChatForeword) -> None:
    """L25431; LangChain 6."""
    engine = llm.get_engine()
    assert llm.get_token_ids("The sky is blue.") == engine.encode("The sky is blue.")
    assert llm.get_num_tokens("The sky is blue.") == 5
    with_tools = llm.get_num_tokens_from_messages([H], tools=[tool(_add)])
    assert with_tools >= llm.get_num_tokens_from_messages([H])
    custom = ChatForeword(engine=engine, custom_get_token_ids=lambda text: [0] * len(text))
    assert custom.get_num_tokens("four") == 4


def _add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_second_turn_reuses_the_first(cold: Engine) -> None:
    """L15695: cached tokens of the second turn are at least the first prompt's, minus one block."""
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=16)
    history: list[BaseMessage] = [SystemMessage("You are a patient teacher of geography."), H]
    first = llm.invoke(history)
    second = llm.invoke([*history, first, HumanMessage("Why?")])
    reused = second.usage_metadata["input_token_details"]["cache_read"]
    assert reused >= first.usage_metadata["input_tokens"] - 16
    assert second.usage_metadata["input_token_details"]["cache_creation"] < second.usage_metadata["input_tokens"] / 2
