"""Fields of the LLM, options of its calls, and what is said about those that do not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate

from llama_index.llms.foreword import Foreword
from llama_index.llms.foreword._messages import to_dicts

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine

MESSAGES = [ChatMessage(role="user", content="Name the three primary colours, please.")]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "kv_cache_memory",
            "1GiB",
            r"kv_cache_memory is an option of the engine: .*engine_options=\{'kv_cache_memory'",
        ),
        ("max_model_len", 512, r"max_model_len is an option of the engine"),
        ("temprature", 0.5, r"unknown option 'temprature': is temperature meant\?"),
        ("max_new_tokens", 8, r"unknown option 'max_new_tokens': give max_tokens"),
        ("max_completion_tokens", 8, r"unknown option 'max_completion_tokens': give max_tokens"),
        ("stop_sequences", ["."], r"unknown option 'stop_sequences': give stop"),
        ("context_window", 512, r"'context_window': give the LLM engine_options=\{'max_model_len': \.\.\.\}"),
        ("num_ctx", 512, r"'num_ctx': give the LLM engine_options=\{'max_model_len': \.\.\.\}"),
        ("api_key", "x", r"unknown option 'api_key': not needed, the model runs in this process"),
        ("additional_kwargs", {}, r"unknown option 'additional_kwargs': name the options in it directly"),
        ("model_name", "x", r"unknown option 'model_name': give model"),
        ("top_logprobs", 5, r"unknown option 'top_logprobs': give logprobs, which is the number"),
        ("logprobs", True, r"logprobs=True: give the number of alternatives"),
        ("prompt_logprobs", False, r"prompt_logprobs=False: give the number of alternatives"),
        ("block_sizes", 8, r"unknown option 'block_sizes': is engine_options=\{'block_size': \.\.\.\} meant\?"),
        ("qqqq", 1, r"unknown option 'qqqq'; known are .*temperature"),
        ("tools", [], "tools belongs to a call"),
        ("n", 2, "n is not available here"),
    ],
)
def test_an_unknown_field_is_named_with_the_way_out(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Foreword(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("formated", True, r"^unknown option 'formated': is formatted meant\?$"),
        ("tool_choise", "any", r"^unknown option 'tool_choise': is tool_choice meant\?$"),
        ("max_new_tokens", 8, "^unknown option 'max_new_tokens': give max_tokens$"),
        ("max_model_len", 512, "^max_model_len is an option of the engine"),
        ("system_prompt", "Be brief.", "^system_prompt belongs to the LLM, not to a call"),
        ("logprobs", True, "^logprobs=True: give the number of alternatives"),
        ("n", 2, "^n is not available here"),
    ],
)
def test_an_unknown_option_of_a_call_is_named_with_the_way_out(llm: Foreword, name: str, value: Any, said: str) -> None:
    for call in (lambda **o: llm.complete("Hello", **o), lambda **o: llm.chat(MESSAGES, **o)):
        with pytest.raises(ValueError, match=said):
            call(**{name: value})


def test_the_options_of_a_call_are_listed(llm: Foreword) -> None:
    with pytest.raises(ValueError, match="unknown option 'qqqq'; known are ") as caught:
        llm.complete("Hello", qqqq=1)
    known = str(caught.value).partition("known are ")[2].split(", ")
    assert {"formatted", "tools", "tool_choice", "temperature", "structured"} <= set(known)
    assert not {"n", "model", "engine_options"} & set(known)
    with pytest.raises(ValueError, match=r"formatted belongs to complete\(\), not to chat\(\)"):
        llm.chat(MESSAGES, formatted=True)


async def test_messages_are_llama_indexs(llm: Foreword) -> None:
    wrong: Any = [MESSAGES[0], {"role": "user", "content": "Hello"}]
    said = r"messages\[1\] is a dict: give ChatMessage\(role=\.\.\., content=\.\.\.\)"
    with pytest.raises(ValueError, match=said):
        llm.chat(wrong)
    with pytest.raises(ValueError, match=said):
        llm.stream_chat(wrong)
    with pytest.raises(ValueError, match=said):
        await llm.achat(wrong)


def test_a_subclass_may_have_fields_of_its_own() -> None:
    class Mine(Foreword):
        nickname: str = "none"

    assert Mine(nickname="fore").nickname == "fore"
    with pytest.raises(ValueError, match="is nickname meant"):
        Mine(nicknam="fore")


# -- cache salt ------------------------------------------------------------------------------------------------


def test_salts_isolate_and_the_same_salt_hits(cold: Engine) -> None:
    """vllm #16016."""

    def cached(salt: str | None, **options: Any) -> int:
        llm = Foreword(engine=cold, temperature=0, max_tokens=2, cache_salt=salt)
        found: int = llm.chat(MESSAGES, **options).raw["usage"]["cached_tokens"]
        return found

    prompt = cold.count_tokens(to_dicts(MESSAGES))
    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert [cached("a"), cached("b"), cached(None)] == [prompt - 1] * 3
    assert cached(None, cache_salt="c") == 0
    assert cached("a", cache_salt="c") == prompt - 1


def test_a_salt_is_kept_and_stays_out_of_traces() -> None:
    llm = Foreword(cache_salt="tenant-7")
    assert "tenant-7" not in repr(llm)
    assert "cache_salt" not in llm.to_payload()
    assert Foreword.from_dict(llm.to_dict()).cache_salt == "tenant-7"


# -- the chat template -----------------------------------------------------------------------------------------


def test_options_of_the_chat_template(engine: Engine) -> None:
    llm = Foreword(engine=engine, max_tokens=2, template_options={"add_generation_prompt": False})
    with pytest.raises(ValueError, match="add_generation_prompt"):
        llm.chat(MESSAGES)
    assert Foreword(engine=engine, max_tokens=2, template_options={"unused": 1}).chat(MESSAGES).raw


@pytest.mark.parametrize(
    "option", [{"template_options": {"a": 1}}, {"tool_choice": "auto"}, {"canonical_tools": False}]
)
def test_a_text_takes_no_options_of_the_chat_template(engine: Engine, option: dict[str, Any]) -> None:
    llm = Foreword(engine=engine, max_tokens=2)
    with pytest.raises(ValueError, match=next(iter(option))):
        llm.complete("Hello", formatted=True, **option)


# -- messages --------------------------------------------------------------------------------------------------


def test_the_next_turn_finds_the_answer_computed(cold: Engine) -> None:
    """langchain #15695, and more: the match reaches to the last token but one of the answer."""
    llm = Foreword(engine=cold, temperature=0, max_tokens=24)
    first = list(llm.stream_chat(MESSAGES))[-1]
    history = [*MESSAGES, first.message, ChatMessage(role="user", content="And the secondary ones?")]
    second = llm.chat(history)
    usage = first.raw["usage"]
    assert second.raw["usage"]["cached_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] - 1


def test_reasoning_goes_back_as_reasoning() -> None:
    from llama_index.core.base.llms.types import TextBlock, ThinkingBlock

    blocks = [ThinkingBlock(content="Hm."), TextBlock(text="Yes.")]
    (turn,) = to_dicts([ChatMessage(role="assistant", blocks=blocks)])
    assert turn == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    (turn,) = to_dicts([ChatMessage(role="assistant", content="Yes.", additional_kwargs={"reasoning_content": "Hm."})])
    assert turn == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    (turn,) = to_dicts([ChatMessage(role="user", content="Why?", additional_kwargs={"reasoning_content": "Hm."})])
    assert turn == {"role": "user", "content": "Why?"}


def test_a_result_says_which_call_it_answers() -> None:
    from llama_index.core.base.llms.types import TextBlock, ToolCallBlock

    extra = {"tool_call_id": "call-one1", "name": "add"}
    expected = {"role": "tool", "content": "3", **extra}
    call = ToolCallBlock(tool_call_id="call-one1", tool_name="add", tool_kwargs={})
    assert to_dicts([ChatMessage(role="tool", content="3", additional_kwargs=extra)]) == [expected]
    assert to_dicts([ChatMessage(role="tool", blocks=[TextBlock(text="3"), call])]) == [expected]


# -- streaming -------------------------------------------------------------------------------------------------


def test_reasoning_streams_apart_from_the_answer(engine: Engine) -> None:
    """The parts as the engine takes them apart; the default model does not reason by itself."""
    from llama_index.core.base.llms.types import ThinkingBlock

    from foreword import MessageDelta, OutputChunk
    from llama_index.llms.foreword._responses import chat_response
    from llama_index.llms.foreword._turn import Turn

    turn, seen = Turn(), []
    for delta in (MessageDelta(reasoning="Let me"), MessageDelta(reasoning=" see."), MessageDelta(content="Yes.")):
        piece = OutputChunk("req-0", 0, "text", [1], delta=delta)
        assert turn.add(piece)
        response = chat_response(engine, turn, piece, None)
        thoughts = [block.content for block in response.message.blocks if isinstance(block, ThinkingBlock)]
        seen.append((thoughts, response.message.content, response.additional_kwargs.get("thinking_delta"), turn.delta))
    assert seen == [
        (["Let me"], "", "Let me", ""),
        (["Let me see."], "", " see.", ""),
        (["Let me see."], "Yes.", None, "Yes."),
    ]


async def test_a_stream_and_a_batch_at_the_same_time(engine: Engine, idle: Callable[[], None]) -> None:
    """vllm #2125: one engine serves both."""
    llm = Foreword(engine=engine, temperature=0, max_tokens=10)
    alone = llm.chat(MESSAGES).message.content
    stream = await llm.astream_chat(MESSAGES)
    first = await anext(stream)
    batch = [await llm.achat(MESSAGES) for _ in range(3)]
    rest = [response async for response in stream]
    assert {response.message.content for response in (rest[-1], *batch)} == {alone}
    assert alone.startswith(first.message.content)
    idle()


async def test_predict_in_all_forms(engine: Engine) -> None:
    """What query engines call: a prompt template in, text or tokens out."""
    llm = Foreword(engine=engine, temperature=0, max_tokens=12, system_prompt="Be brief.")
    prompt = PromptTemplate("What is the capital of {country}?")
    whole = llm.predict(prompt, country="France")
    assert await llm.apredict(prompt, country="France") == whole
    assert "".join(llm.stream(prompt, country="France")) == whole
    assert "".join([token async for token in await llm.astream(prompt, country="France")]) == whole
