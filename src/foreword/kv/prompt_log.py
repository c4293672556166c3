"""The prompts that ran lately, so that a new one can be compared with those it nearly was.

The tree knows what is cached; the log also knows what was, and in which namespace. Prompts are kept sorted by their
tokens: the ones that share the longest beginning with a new prompt stand next to where it would be put.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from foreword.core.common_prefix import common_prefix_length

_MAX_TOKENS = 1_000_000
_ENTRY_TOKENS = 128  # as much memory as so many tokens takes what every prompt has besides
_NEIGHBOURS = 6  # looked at on either side
_LATEST = 4  # looked at besides them


class LoggedPrompt:
    """A prompt that was admitted, and what was generated behind it once that is known.

    Attributes:
        key: its token ids, four bytes each, so that keys are compared at C speed and sort in one order.
        num_prompt: how many of the tokens are the prompt's.
        num_computed: leading tokens whose KV was computed, and so was cached then.
        source: what the prompt was rendered from; None for a plain one.
    """

    __slots__ = ("request_id", "namespace", "key", "num_prompt", "num_computed", "source")

    def __init__(self, request_id: str, namespace: bytes, token_ids: Sequence[int], source: object) -> None:
        self.request_id = request_id
        self.namespace = namespace
        self.key = _key(token_ids)
        self.num_prompt = len(token_ids)
        self.num_computed = 0
        self.source = source


class Neighbour(NamedTuple):
    """A logged prompt as it was when another one was looked up.

    Attributes:
        num_common: leading tokens that both share.
        num_computed: leading tokens of the logged one that were computed by then.
        key: its tokens by then.
    """

    prompt: LoggedPrompt
    num_common: int
    num_computed: int
    key: bytes

    @property
    def token_ids(self) -> list[int]:
        ids = array("I", self.key)
        ids.byteswap()
        return ids.tolist()


class PromptLog:
    """A bounded log; the oldest prompts go first.

    Args:
        max_tokens: of all prompts together, at four bytes each and what they were rendered from.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._by_age: deque[LoggedPrompt] = deque()
        self._sorted: list[LoggedPrompt] = []
        self._of_namespace: dict[bytes, list[LoggedPrompt]] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, prompt: LoggedPrompt) -> None:
        self._by_age.append(prompt)
        self._put(prompt)
        while self._num_tokens > self._max_tokens and len(self._by_age) > 1:
            self._take(self._by_age.popleft())

    def complete(self, prompt: LoggedPrompt, token_ids: Sequence[int], num_computed: int) -> None:
        """The first ``num_computed`` of ``token_ids``, the prompt and what was generated behind it, were computed."""
        if num_computed <= prompt.num_computed:
            return
        prompt.num_computed = num_computed
        if _find(self._sorted, prompt) is None:  # too old by now
            return
        self._take(prompt)
        prompt.key = _key(token_ids[: max(num_computed, prompt.num_prompt)])
        self._put(prompt)

    def around(self, namespace: bytes, token_ids: Sequence[int]) -> tuple[list[Neighbour], Neighbour | None]:
        """Prompts of the namespace that begin alike, and its latest; and the one elsewhere that begins most alike."""
        key, mates = _key(token_ids), self._of_namespace.get(namespace, [])
        latest = [prompt for prompt in islice(reversed(self._by_age), 4 * _LATEST) if prompt.namespace == namespace]
        near = {id(prompt): prompt for prompt in _neighbours(mates, key) + latest[:_LATEST]}
        others = [_neighbour(p, key) for p in _neighbours(self._sorted, key) if p.namespace != namespace]
        computed = [each._replace(num_common=min(each.num_common, each.num_computed)) for each in others]
        elsewhere = max(computed, key=lambda each: each.num_common, default=None)
        return [_neighbour(prompt, key) for prompt in near.values()], elsewhere

    def _put(self, prompt: LoggedPrompt) -> None:
        insort(self._sorted, prompt, key=_key_of)
        insort(self._of_namespace.setdefault(prompt.namespace, []), prompt, key=_key_of)
        self._num_tokens += _weight(prompt)

    def _take(self, prompt: LoggedPrompt) -> None:
        mates = self._of_namespace[prompt.namespace]
        for prompts in (self._sorted, mates):
            index = _find(prompts, prompt)
            assert index is not None, "a logged prompt is out of order"
            del prompts[index]
        if not mates:
            del self._of_namespace[prompt.namespace]
        self._num_tokens -= _weight(prompt)


def _weight(prompt: LoggedPrompt) -> int:
    return len(prompt.key) // 4 + _ENTRY_TOKENS


def _key(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    ids.byteswap()  # big-endian on the machines there are; elsewhere another order, as good as this one
    return ids.tobytes()


def _key_of(prompt: LoggedPrompt) -> bytes:
    return prompt.key


def _neighbour(prompt: LoggedPrompt, key: bytes) -> Neighbour:
    common = common_prefix_length(prompt.key, 0, key, 0, len(key)) // 4
    return Neighbour(prompt, common, prompt.num_computed, prompt.key)


def _neighbours(prompts: list[LoggedPrompt], key: bytes) -> list[LoggedPrompt]:
    index = bisect_left(prompts, key, key=_key_of)
    return prompts[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS]


def _find(prompts: list[LoggedPrompt], prompt: LoggedPrompt) -> int | None:
    index = bisect_left(prompts, prompt.key, key=_key_of)
    while index < len(prompts) and prompts[index].key == prompt.key:
        if prompts[index] is prompt:
            return index
        index += 1
    return None
