"""The default model as it is by default, small enough a cache for a hundred short answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from foreword import Engine
    from foreword.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def engine(shared_engines: Callable[..., Engine]) -> Engine:
    return shared_engines("smollm2-135m", kv_cache_memory="256MiB")


@pytest.fixture(scope="session")
def tokenizer(engine: Engine) -> Tokenizer:
    return engine._client.tokenizer
