"""A chat model with bound options, on which more can be bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig

from langchain_foreword._structured import structured_model

if TYPE_CHECKING:
    from foreword import CacheExplanation


class ForewordBinding(RunnableBinding[LanguageModelInput, AIMessage]):
    """What `ChatForeword.bind`, `with_config` and `bind_tools` return.

    LangChain's own binding forwards `bind_tools` to the bare model and so forgets what was bound before.
    """

    @classmethod
    def lc_id(cls) -> list[str]:
        return [*RunnableBinding.get_lc_namespace(), "RunnableBinding"]  # to JSON it is an ordinary one

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """`ChatForeword.bind_tools`, on top of what is bound already."""
        return self._on_top(self.bound.bind_tools(tools, **kwargs))  # type: ignore[attr-defined]

    def with_structured_output(self, schema: Any = None, **kwargs: Any) -> Runnable[LanguageModelInput, Any]:
        """`ChatForeword.with_structured_output`, on top of what is bound already."""
        return structured_model(self.bound, schema, self._on_top, **kwargs)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """The exact prompt length of a call with these messages and the bound tools."""
        model: Any = self.bound
        options = dict(self.kwargs) if tools is None else {**self.kwargs, "tools": tools}
        count: int = model._count_prompt(messages, options)
        return count

    def explain(
        self,
        input: LanguageModelInput,
        tools: Sequence[Any] | None = None,
        *,
        config: RunnableConfig | None = None,
        **options: Any,
    ) -> CacheExplanation:
        """`ChatForeword.explain`, with the options, tools and config that are bound."""
        model: Any = self.bound
        options = {**self.kwargs, **options} | ({} if tools is None else {"tools": tools})
        found: CacheExplanation = model.explain(input, config=self._merge_configs(config), **options)
        return found

    def _on_top(self, binding: Any) -> ForewordBinding:
        bound: ForewordBinding = self.bind(**binding.kwargs)  # type: ignore[assignment]
        return bound
