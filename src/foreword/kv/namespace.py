"""Which cache entries a request may see."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that the content of a KV block depends on.

    Attributes:
        weights: identifies the weights.
        config: the model's configuration, RoPE parameters included.
        layout: shape, dtype and block size of the KV.
        adapter: name and digest of an adapter; "" without one.
        salt: a tenant's salt; "" without one.
    """

    weights: str
    config: str
    layout: str
    adapter: str = ""
    salt: str = ""

    def key(self) -> bytes:
        """A digest in which each part is tagged and length-prefixed, so that no part can pass for another."""
        digest = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name).encode()
            digest.update(f"{field.name}:{len(value)}:".encode() + value)
        return digest.digest()
