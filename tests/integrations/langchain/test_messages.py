"""Any conversation a LangChain program holds reaches the model, or is refused clearly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool

from foreword import AssistantMessage, CompletionOutput, MessageDelta, OutputChunk, RequestOutput, ToolCall, Usage
from langchain_foreword import ChatForeword
from langchain_foreword._messages import to_dicts
from langchain_foreword._results import chat_chunk, chat_result

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
        [HumanMessageChunk("One plus "), HumanMessageChunk("two?")],
        [H, AIMessageChunk("Three.", tool_calls=[CALL]), FunctionMessage("3", name="add")],
        [H, AIMessage("", invalid_tool_calls=[{"name": "add", "args": '{"a": 1', "id": "x", "error": "cut"}]), H],
        [H, AIMessage([], tool_calls=[CALL]), ToolMessage([{"type": "text", "text": "3"}], tool_call_id="call-1")],
        [ToolMessage("3", tool_call_id="call-1")],
    ],
)
def test_no_order_of_roles_raises(llm: ChatForeword, messages: list[BaseMessage]) -> None:
    """langchain #16992; langchain #15232: a history that ends in a ToolMessage."""
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


def test_results_of_tools_are_text(engine: Engine) -> None:
    """The artifact is the program's own; a failure is told in words, as chat templates have no place for a status."""
    results = [
        ToolMessage("no such city", tool_call_id="1", status="error"),
        ToolMessage("Error: no such city", tool_call_id="2", status="error", name="get_weather"),
        ToolMessage([{"type": "text", "text": "sunny"}, " and dry"], tool_call_id="3", artifact={"raw": object()}),
        ToolMessage([{"type": "json", "json": {"grad": 21, "ort": "Köln"}}], tool_call_id="4"),
        ToolMessage([{"temperature": 21}], tool_call_id="5"),
        ToolMessage(21, tool_call_id=6),
    ]
    contents = [turn["content"] for turn in to_dicts(results)]
    assert contents[:2] == ["Error: no such city", "Error: no such city"]
    assert contents[2:] == ["sunny and dry", '{"grad": 21, "ort": "Köln"}', '{"temperature": 21}', "21"]
    assert to_dicts(results)[1]["name"] == "get_weather"
    llm = ChatForeword(engine=engine, temperature=0, max_tokens=2)
    assert llm.invoke([H, AIMessage("", tool_calls=[CALL]), *results]).usage_metadata["output_tokens"] == 2


def test_thoughts_and_calls_go_back_unchanged() -> None:
    """What was generated returns as it was, so that its tokens are found again."""
    thought = AIMessage("Three.", additional_kwargs={"reasoning_content": "1 + 2 = 3"}, tool_calls=[CALL])
    (turn,) = to_dicts([thought])
    assert (turn["content"], turn["reasoning_content"]) == ("Three.", "1 + 2 = 3")
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    cut = AIMessage("", invalid_tool_calls=[{"name": "add", "args": '{"a": 1', "id": "x", "error": "cut"}])
    assert to_dicts([cut])[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1'}
    blocks = [{"type": "reasoning", "reasoning": "1 + 2 = 3"}, {"type": "text", "text": "Three."}]
    ours = AIMessage(blocks, response_metadata={"model_provider": "foreword", "output_version": "v1"})
    assert to_dicts([ours])[0]["reasoning_content"] == "1 + 2 = 3"
    assert "reasoning_content" not in to_dicts([AIMessage(blocks)])[0]  # thoughts of another provider


def test_thoughts_are_shown_apart_from_the_answer(engine: Engine) -> None:
    answer = AssistantMessage("Three.", "1 + 2 = 3", (ToolCall("abc123def", "add", '{"a": 1}'),))
    completion = CompletionOutput(0, "<think>...", [5, 6, 7], "stop", message=answer)
    output = RequestOutput("req-0", [1, 2], [completion], Usage(2, 1, 3))
    message = chat_result(engine, output).generations[0].message
    assert message.additional_kwargs == {"reasoning_content": "1 + 2 = 3"}
    assert [block["type"] for block in message.content_blocks] == ["reasoning", "text", "tool_call"]
    assert message.response_metadata["finish_reason"] == "tool_calls"
    deltas = [MessageDelta(reasoning="1 + 2"), MessageDelta(reasoning=" = 3"), MessageDelta("Three.")]
    chunks = [chat_chunk(engine, OutputChunk("req-0", 0, "", [], delta=delta)) for delta in deltas]
    total = chunks[0].message + chunks[1].message + chunks[2].message
    assert (total.content, total.additional_kwargs) == ("Three.", {"reasoning_content": "1 + 2 = 3"})
    assert chat_chunk(engine, OutputChunk("req-0", 0, "<think>", [5], delta=MessageDelta())) is None


def test_messages_that_are_no_turns_raise(llm: ChatForeword) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\] is a RemoveMessage"):
        llm.invoke([H, RemoveMessage(id="1")])


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
    """llama_index #17496."""
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens.*max_model_len=8192"):
        llm.invoke("word " * 9000)


def test_offline_token_counts_are_exact(llm: ChatForeword) -> None:
    """langchain #25431."""
    engine = llm.get_engine()
    assert llm.get_token_ids("The sky is blue.") == engine.encode("The sky is blue.")
    assert llm.get_num_tokens("The sky is blue.") == 5
    with_tools = llm.get_num_tokens_from_messages([H], tools=[tool(_add)])
    definition = convert_to_openai_tool(tool(_add))
    assert with_tools == engine.count_tokens([{"role": "user", "content": H.text}], tools=[definition])
    assert with_tools > llm.get_num_tokens_from_messages([H])
    custom = ChatForeword(engine=engine, custom_get_token_ids=lambda text: [0] * len(text))
    assert custom.get_num_tokens("four") == 4


def _add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_prompt_has_exactly_one_start_token(llm: ChatForeword) -> None:
    """llama-cpp-python #1501: the template writes it, and nothing adds another."""
    engine = llm.get_engine()
    message = llm.invoke([S, H], prompt_logprobs=0)
    rest = [next(iter(entry)) for entry in message.response_metadata["prompt_logprobs"][1:]]
    assert engine.decode(rest).startswith("system\nBe brief.")
    assert engine.decode(rest[:1]) == "system"  # a second start token would stand here
    assert len(rest) + 1 == message.usage_metadata["input_tokens"]


@pytest.mark.usefixtures("real_engine")  # random tokens may be no text, and a message is text
def test_second_turn_reuses_the_first(cold: Engine) -> None:
    """langchain #15695: cached tokens of the second turn are at least the first prompt's, minus one block."""
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=16)
    history: list[BaseMessage] = [SystemMessage("You are a patient teacher of geography."), H]
    first = llm.invoke(history)
    second = llm.invoke([*history, first, HumanMessage("Why?")])
    reused = second.usage_metadata["input_token_details"]["cache_read"]
    assert reused >= first.usage_metadata["input_tokens"] - 16
    assert reused == first.usage_metadata["input_tokens"] + first.usage_metadata["output_tokens"] - 1
    assert second.usage_metadata["input_token_details"]["cache_creation"] < second.usage_metadata["input_tokens"] / 2
