"""The default model's tokenizer, converted once per session."""

from __future__ import annotations

import pytest

from foreword.model.source import resolve
from foreword.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return Tokenizer.from_directory(resolve("smollm2-135m").directory)
