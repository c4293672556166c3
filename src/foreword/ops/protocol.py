"""The compute primitives a model is written in. A backend implements :class:`Ops`; the model sees nothing else.

Contract of every backend (the design's exactness rule): a row of any result depends only on that row's inputs,
never on how many rows the batch holds, nor on where chunk or cache borders fell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Union

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
LinearOp = Callable[["Tensor"], "Tensor"]
"""``[N, in_features] -> [N, out_features]``; the weight is packed inside."""


Quantization = Literal["int8", "int4"]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight ``[out, in]`` in groups of 32 inputs, in the bytes that GGUF files use.

    Attributes:
        scheme: "int8": Q8_0, per group a float16 scale and 32 signed bytes; "int4": Q4_1, per group a float16 scale,
            a float16 minimum and 16 bytes (inputs 0 .. 15 in the low halves, 16 .. 31 in the high ones).
        blocks: ``[out, bytes of a row]`` uint8.
        shape: ``(out, in)``.
    """

    scheme: Quantization
    blocks: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A weight ``[out, in]`` of a quantised checkpoint, see :mod:`foreword.ops.grouped`: a value is ``(number - zero) *
    scale``. A group is neighbouring inputs of one output; all are of the same size.

    Attributes:
        numbers: ``[out, in]``: uint8 below 16, or float8_e4m3fn.
        scales: ``[groups, out]``: float16 of uint8, float32 of float8.
        zeros: ``[groups, out]`` uint8, up to 16; None of float8: they are 0.
        order: ``[in]``: which input comes at each place of ``numbers``; None: they are in order.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // len(self.scales)


Weight = Union["Tensor", QuantizedWeight, GroupedWeight]
"""What products are made with: plain numbers, our own blocks, or a quantised checkpoint's groups."""


class SlotRun(NamedTuple):
    """``length`` token slots of the KV pool that lie side by side from ``start``."""

    start: int
    length: int


class SlotCopy(NamedTuple):
    """Copy ``length`` slots from ``source`` to ``target`` in every layer."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class AttentionSequence:
    """One sequence's share of a flat batch.

    Attributes:
        query_start: its first row in the flat batch.
        query_len: its rows; they are the last ``query_len`` of its ``kv_len`` positions.
        kv_len: positions it attends to, the rows of this batch included.
        runs: where the KV of positions ``0 .. kv_len - 1`` lies, in order.
    """

    query_start: int
    query_len: int
    kv_len: int
    runs: tuple[SlotRun, ...]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention does.

    Attributes:
        scale: factor of the scores.
        window: positions visible to a query, itself included; None sees all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class KVLayer(NamedTuple):
    """One layer of the KV pool: two tensors ``[num_kv_heads, num_slots, head_dim]``, or, of int8, ``[num_kv_heads,
    num_slots, head_dim + SCALE_BYTES]``; see :mod:`foreword.ops.kv_int8`."""

    key: Tensor
    value: Tensor


class Rotation(NamedTuple):
    """``cos, sin [N, D / 2]`` float32, one row per token or, in tables, per position."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer, packed. Norm weights hold the offset already; None: the model has no such norm."""

    qkv: LinearOp  # [N, hidden] -> [N, (num_heads + 2 * num_kv_heads) * head_dim]
    output: LinearOp  # [N, num_heads * head_dim] -> [N, hidden]
    gate_up: LinearOp  # [N, hidden] -> [N, 2 * intermediate]
    down: LinearOp  # [N, intermediate] -> [N, hidden]
    attention: AttentionSpec
    rotation: Rotation | None  # tables [positions, head_dim / 2]; None: not rotated
    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    attention_post_norm: Tensor | None = None  # [hidden]
    mlp_post_norm: Tensor | None = None  # [hidden]
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None  # [head_dim]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all layers of a decoder have in common."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    attention_scale: float


class Draw(NamedTuple):
    """How a row's token is drawn. ``top_k`` is applied first, then ``top_p`` to what is left, then ``min_p``.

    Attributes:
        temperature: divides the logits; 0 takes the first of the most likely tokens, whatever the others are.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep tokens while the probability of those before them, from the most likely on, is less than this.
        min_p: drop tokens less likely than this times the most likely one, which always stays.
        u: in [0, 1): the kept tokens' probabilities lie side by side on a line, and this points at one of them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    u: float = 0.0


class FusedLayers(Protocol):
    """All layers of a decoder as one operation."""

    def __call__(
        self,
        hidden: Tensor,
        plan: Any,
        slots: Tensor,
        layers: Sequence[KVLayer],
        outputs: Tensor,
    ) -> Tensor:
        """``hidden [T, hidden]`` embeddings, ``slots [T]`` and ``outputs [R]`` int32; gives ``[R, hidden]``, the hidden
        states of the rows ``outputs`` after the final norm."""


class Ops(Protocol):
    """The primitives. Activations are ``[N, features]``; N may include padding rows at the end."""

    name: str
    """Of its kernels, for logs."""

    num_threads: int
    """Threads that compute."""

    tiles_used: int
    tiles_read: int
    """Counters of all plans made; see :class:`foreword.core.outputs.EngineStats`."""

    @property
    def kv_layout(self) -> str:
        """Names how KV lies in the pool and what computed it: KV of another layout must not be read."""

    def enter_thread(self) -> None:
        """Called first on every thread that works with this backend."""

    def pad_rows(self, num_rows: int) -> int:
        """The row count, at least ``num_rows``, that this backend wants a batch to be padded to."""

    def linear(self, weight: Weight, bias: Tensor | None = None) -> LinearOp:
        """Pack ``weight [out, in]`` (and ``bias [out]``), which lie on this backend's device, for repeated products.

        Raises:
            ValueError: a :class:`GroupedWeight` cannot be held as this backend's kernels need it.
        """

    def fuse(self, shape: DecoderShape, layers: Sequence[LayerWeights], final_norm: Tensor) -> FusedLayers | None:
        """The layers as one operation; None: this backend has none, and they are run primitive by primitive."""

    def calibrate(self, shape: DecoderShape, kv_dtype: torch.dtype, directory: Path) -> None:
        """Measure what plans are weighed by, in a few milliseconds, or read what ``directory`` keeps of the last time.
        Changes no result, only the time."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """A token of each row of ``logits [R, V]`` float32, drawn as ``draws`` says; -1 where a NaN is or the largest
        is infinite. Gives ``[R]`` int32 on the device of the logits, and waits for nothing there."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, statistics in float32. ``x [..., D]``, ``weight [D]``."""

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """``act(gate) * up`` for ``gate_up [N, 2 * I]`` with the gate in the first half; gives ``[N, I]``."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding (half-split form). ``x [N, heads, D]``; ``cos, sin [N, R / 2]`` float32, R <= D rotated."""

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slots: Tensor) -> None:
        """Write the first ``len(slots)`` rows of ``key, value [N, num_kv_heads, D]`` into ``slots`` (int32)."""

    def plan_attention(self, sequences: Sequence[AttentionSequence]) -> Any:
        """Everything about the batch's attention that is the same in all layers; made once per step."""

    def attention(self, query: Tensor, layer: KVLayer, plan: Any, spec: AttentionSpec) -> Tensor:
        """Causal attention over paged KV. ``query [N, num_heads, D]``; gives ``[N, num_heads, D]``.

        Rows beyond the plan's sequences are padding; their result is finite and otherwise unspecified.
        """

    def copy_slots(self, pool: Tensor, copies: Sequence[SlotCopy]) -> None:
        """Carry out ``copies`` on ``pool [num_layers, 2, num_kv_heads, num_slots, ..]``, the layers of a KV pool."""

    def copy_blocks(self, source: Tensor, target: Tensor, copies: Sequence[SlotCopy]) -> None:
        """Carry out ``copies`` of whole blocks between two pools of one geometry: the device's, and one in main memory
        that the device reaches."""

    def aside(self) -> AbstractContextManager[None]:
        """For work beside the model, on any thread: what is launched within it begins after all that the thread that
        called this had launched by then, waits for nothing later, and is done when it is left. To be entered once."""
