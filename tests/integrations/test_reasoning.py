"""Thoughts from the model's tokens up to what LangChain and LlamaIndex show, whole and streamed, and back again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage

from foreword.runtime.sampler import Sample
from langchain_foreword import ChatForeword
from llama_index.llms.foreword import Foreword
from support import TINY_EOS, assert_idle, save_tiny_llama, tiny_options

if TYPE_CHECKING:
    from foreword import Engine

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<user>' if m.role == 'user' else '<model>' }}"
    "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content }}{% if m.role != 'user' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
QUESTION = "1 + 1?"
MESSAGES = [{"role": "user", "content": QUESTION}]
THOUGHT, ANSWER = "One and one: zwölf?\nNo, two.", "Two < three."
WRITTEN = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
Scripted = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The tiny model with a template that knows thoughts."""
    from foreword import Engine

    directory = save_tiny_llama(tmp_path_factory.mktemp("thinker"))
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    with Engine(str(directory), **tiny_options()) as engine:
        yield engine


@pytest.fixture
def scripted(thinker: Engine) -> Scripted:
    """Within it, the model says `WRITTEN`, byte by byte, whatever its logits are."""
    script = [*WRITTEN.encode(), TINY_EOS]

    @contextmanager
    def written() -> Iterator[None]:
        runner = thinker._loop.core.runner

        def sample(sequences: list[Any], _: Any) -> list[Sample]:
            return [Sample(each, each.index, script[len(each.token_ids) - each.num_prompt]) for each in sequences]

        runner._sample = sample  # type: ignore[method-assign]
        try:
            yield
        finally:
            del runner._sample
        assert_idle(thinker)

    return written


def test_engine(thinker: Engine, scripted: Scripted) -> None:
    assert thinker.can_reason
    with scripted():
        output = thinker.chat(MESSAGES)
        chunks = list(thinker.stream_chat(MESSAGES))
    assert output.text == WRITTEN
    assert (output.message.reasoning, output.message.content) == (THOUGHT, ANSWER)
    assert "".join(chunk.delta.reasoning for chunk in chunks) == THOUGHT
    assert "".join(chunk.delta.content for chunk in chunks) == ANSWER
    kinds = ["thought" if chunk.delta.reasoning else "answer" for chunk in chunks if chunk.delta]
    assert kinds == sorted(kinds, reverse=True)  # all of the thought comes first
    assert len(kinds) > len(ANSWER)  # byte by byte, not as a whole
    assert chunks[-1].output.outputs[0].message == output.message


async def test_langchain(thinker: Engine, scripted: Scripted) -> None:
    llm = ChatForeword(engine=thinker)
    assert llm.profile["reasoning_output"]
    with scripted():
        whole = [llm.invoke(QUESTION), await llm.ainvoke(QUESTION)]
        streams = [list(llm.stream(QUESTION)), [chunk async for chunk in llm.astream(QUESTION)]]
    sums = [sum(rest, start=first) for first, *rest in streams]
    for message in whole + sums:
        assert message.additional_kwargs["reasoning_content"] == THOUGHT
        assert message.text == ANSWER
        blocks = [(block["type"], block.get("reasoning", block.get("text"))) for block in message.content_blocks]
        assert blocks == [("reasoning", THOUGHT), ("text", ANSWER)]
    for chunks in streams:
        assert not any(chunk.text and "reasoning_content" in chunk.additional_kwargs for chunk in chunks)


async def test_llama_index(thinker: Engine, scripted: Scripted) -> None:
    llm, messages = Foreword(engine=thinker), [ChatMessage(role="user", content=QUESTION)]
    with scripted():
        whole = [llm.chat(messages), await llm.achat(messages)]
        streams = [list(llm.stream_chat(messages)), [part async for part in await llm.astream_chat(messages)]]
    for response in [*whole, *(parts[-1] for parts in streams)]:
        assert response.message.content == ANSWER
        thoughts = [block.content for block in response.message.blocks if isinstance(block, ThinkingBlock)]
        assert thoughts == [THOUGHT]
    for parts in streams:
        assert "".join(part.delta or "" for part in parts) == ANSWER
        assert "".join(part.additional_kwargs.get("thinking_delta") or "" for part in parts) == THOUGHT


def test_the_next_turn_finds_the_thought_in_the_cache(thinker: Engine, scripted: Scripted) -> None:
    """What each adapter hands back as the model's turn is what the model wrote, thought included."""
    again = "Sure?"
    with scripted():
        message = ChatForeword(engine=thinker).invoke(QUESTION)
        response = Foreword(engine=thinker).chat([ChatMessage(role="user", content=QUESTION)])
        used = message.usage_metadata["input_tokens"] + message.usage_metadata["output_tokens"] - 1
        second = ChatForeword(engine=thinker).invoke([HumanMessage(QUESTION), message, HumanMessage(again)])
        turns = [ChatMessage(role="user", content=text) for text in (QUESTION, again)]
        other = Foreword(engine=thinker).chat([turns[0], response.message, turns[1]])
        bare = ChatForeword(engine=thinker).invoke([HumanMessage(QUESTION), AIMessage(ANSWER), HumanMessage(again)])
    assert second.usage_metadata["input_token_details"]["cache_read"] >= used
    assert other.raw["usage"]["cached_tokens"] >= used
    assert bare.usage_metadata["input_token_details"]["cache_read"] < used
