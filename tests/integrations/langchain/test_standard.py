"""LangChain's own standard tests: on the default model where they read what it says, else on a tiny random one."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_foreword import ChatForeword

LONG = "You answer in one short sentence. " * 20
UsageDetail = Literal["audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"]


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatForeword

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @pytest.mark.xfail(
        strict=True,
        raises=ValueError,  # of load(): a snapshot that differs is an AssertionError
        reason="LangChain's 'all' allows its own partners only; test_options.py allows this class by name",
    )
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


READ = (
    "test_tool_calling",
    "test_tool_calling_async",
    "test_bind_runnables_as_tools",
    "test_unicode_tool_call_integration",
    "test_agent_loop",
)
"""Tests of what the model says."""


class TestIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def take_engine(self, request: pytest.FixtureRequest) -> None:
        self.engine = request.getfixturevalue("real_engine" if request.node.originalname in READ else "tiny_engine")

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatForeword

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.engine.model, "temperature": 0, "max_tokens": 48}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        return self.engine.model  # the one it has; that a name per call counts is tested in test_options.py

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[UsageDetail]]:
        return {
            "invoke": ["cache_read_input", "cache_creation_input"],
            "stream": ["cache_read_input", "cache_creation_input"],
        }

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self._ask("Which city is the capital of Peru?", stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self._ask("Which city is the capital of France?", stream)
        message = self._ask("Which city is the capital of Japan?", stream)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] > 100
        return message

    @pytest.mark.xfail(
        strict=True,
        raises=AssertionError,
        reason="a model of 135 M parameters writes code about the weather; it calls the tool if it must",
    )
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    def _ask(self, question: str, stream: bool) -> AIMessage:
        llm = ChatForeword(model=self.engine.model, temperature=0, max_tokens=8)
        messages = [SystemMessage(LONG), HumanMessage(question)]
        if not stream:
            return llm.invoke(messages)
        first, *rest = llm.stream(messages)
        return sum(rest, start=first)
