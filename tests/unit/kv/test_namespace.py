"""Cache namespaces."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

from foreword.kv.cache import KVCacheManager
from foreword.kv.namespace import Namespace

BASE: dict[str, str] = {"weights": "w", "config": "c", "layout": "l"}


def test_parts_are_domain_separated() -> None:
    """The same text in another part, or cut elsewhere, is another namespace: adapter "x" is not salt "x"."""
    texts = ["", "x", "xy", "y", "x:1:y", "adapter:1:x", "1:x"]
    keys = {Namespace(**BASE, adapter=a, salt=s).key() for a, s in itertools.product(texts, texts)}
    assert len(keys) == len(texts) ** 2
    assert Namespace(weights="ab", config="c", layout="").key() != Namespace(weights="a", config="bc", layout="").key()


def test_every_part_counts() -> None:
    """A change in any part is another namespace, an adapter reloaded under one name too."""
    base = Namespace(**BASE)
    for field in dataclasses.fields(Namespace):
        assert dataclasses.replace(base, **{field.name: "other"}).key() != base.key()
    assert Namespace(**BASE).key() == base.key()


def test_keys_are_the_same_in_another_process() -> None:
    """Keys do not depend on the process's hash seed."""
    program = (
        "from foreword.kv.namespace import Namespace as N; print(N(weights='w', config='c', layout='l').key().hex())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {Namespace(**BASE).key().hex()}


def test_namespaces_do_not_see_each_other() -> None:
    """The same tokens under another key miss; under the same key they hit."""
    manager = KVCacheManager(10, 2)
    tokens = [1, 2, 3, 4, 5]
    held = manager.allocate(b"a", manager.lookup(b"a", tokens, 4), 5)
    manager.commit(held, tokens, 5)
    manager.release(held, tokens, 5)
    assert manager.lookup(b"b", tokens, 5).num_tokens == 0
    assert manager.lookup(b"a", tokens, 5).num_tokens == 5
