"""Where Foreword must land, per workload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one of our numbers.

    Attributes:
        bound: of ours divided by the peer's, or of ours itself if it has a unit.
        at_least: whether ours must reach the bound; otherwise it must not pass it.
        ours: the variant it is for; None takes our best.
        peer: the entry to compare with; None takes the best peer.
    """

    workload: str
    bound: float
    at_least: bool = False
    unit: str = ""
    ours: str | None = None
    peer: str | None = None

    def met(self, value: float) -> bool:
        """Whether a ratio, or our number itself, is where it must be."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g} {self.unit}".rstrip()


TARGETS = (
    Target("W1", 0.8),
    Target("W2", 0.7),
    Target("W3", 1.6, at_least=True, ours="foreword:int8", peer="llamacpp:q8_0"),
    Target("W3", 1.0, at_least=True, ours="foreword:int4", peer="llamacpp:q4_0"),
    Target("W3L", 2.0, at_least=True, ours="foreword:int8", peer="llamacpp:q8_0"),
    Target("W3L", 1.2, at_least=True, ours="foreword:int4", peer="llamacpp:q4_0"),
    Target("W4", 2.5, at_least=True),
    Target("W4w", 2.5, at_least=True),
    Target("W5", 0.5),
    Target("W6", 0.5),
    Target("W7", 1.5, at_least=True),
    Target("start", 2.0, unit="s"),
    Target("memory", 0.8, unit="GB"),
)
