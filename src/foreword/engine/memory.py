"""How much memory there is, what the model takes of it, and what is left for KV.

On a GPU a step as large as any is run before the KV cache is made, so that it leaves room for what steps need besides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch

from foreword.core.errors import ModelLoadError
from foreword.core.request import Request
from foreword.core.sampling import SamplingParams
from foreword.kv.pool import KVGeometry, KVPool
from foreword.kv.tiers import TieredCache
from foreword.ops.triton.streams import WHOLE_DEVICE
from foreword.runtime.runner import ModelRunner
from foreword.scheduling.policy import create_policy
from foreword.scheduling.scheduler import Scheduler
from foreword.scheduling.sequence import Sequence

T = TypeVar("T")

KV_SHARE_OF_FREE_MEMORY = 0.2
"""Share of the free main memory that the KV cache takes when ``kv_cache_memory`` is not given."""


class Room(NamedTuple):
    """Bytes of a memory: all of it, and what nobody uses."""

    total: int
    free: int

    def share(self, utilization: float) -> int:
        """What is left for us if so much of all may be used, by us and others together."""
        return max(0, self.free - (self.total - int(utilization * self.total)))


class Probe(Protocol):
    """A device's memory."""

    def room(self) -> Room:
        """What is there now; what is only kept to be used again counts as free."""

    def peak(self, run: Callable[[], object]) -> int:
        """Carry out ``run``; the most that it takes at a time, and what it leaves taken."""


class GPUProbe:
    """That of a GPU, by what torch reserves: its tensors, and the gaps between them."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def room(self) -> Room:
        with WHOLE_DEVICE:  # another engine may be capturing a graph
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return Room(total, free)

    def peak(self, run: Callable[[], object]) -> int:
        before, reserved = self.room().free, torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        peak = torch.cuda.max_memory_reserved(self._device) - reserved
        taken = before - self.room().free
        kept = torch.cuda.memory_reserved(self._device) - reserved
        return peak + max(0, taken - kept)  # kernels and libraries that were loaded are not torch's


class Memory(Protocol):
    """What a model and its KV share."""

    def load(self, load: Callable[[], T], needed: int) -> T:
        """Load the weights, which take about ``needed`` bytes.

        Raises:
            ModelLoadError: they do not fit; the message has the numbers.
        """

    def for_kv(self, step: Callable[[], object], least: int) -> int:
        """Bytes for the KV cache, now that the weights are there.

        Args:
            step: runs a step as large as any, with next to no KV.
            least: bytes that the KV cache must have.

        Raises:
            ModelLoadError: they are not there; the message has the numbers.
        """


class MainMemory:
    """Where the CPU computes, beside everything else. A step takes little, and KV a share of what is free.

    Args:
        model: its name, for messages.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def load(self, load: Callable[[], T], needed: int) -> T:
        available = _available_memory()
        if available is not None and needed > available + _swap():  # else the system would end the process
            raise ModelLoadError(
                f"{self._model} does not fit in memory: its weights take about {_gb(needed)}, and "
                f"{_gb(available)} are free: give a smaller quantization or model, or end what else runs"
            )
        return load()

    def for_kv(self, step: Callable[[], object], least: int) -> int:  # noqa: ARG002
        return int(KV_SHARE_OF_FREE_MEMORY * free_memory())


class DeviceMemory:
    """That of a GPU.

    Args:
        model: its name, for messages.
        utilization: share of all that may be used.
    """

    def __init__(self, device: str, model: str, utilization: float, probe: Probe) -> None:
        self._device = device
        self._model = model
        self._utilization = utilization
        self._probe = probe
        self._weights = 0

    def load(self, load: Callable[[], T], needed: int) -> T:
        before = self._probe.room()
        if needed > before.share(self._utilization):
            self._refuse(before, needed)
        try:
            loaded = load()
        except torch.OutOfMemoryError as error:
            self._refuse(before, needed, error)
        self._weights = before.free - self._probe.room().free
        return loaded

    def for_kv(self, step: Callable[[], object], least: int) -> int:
        loaded, cause = self._probe.room(), None
        try:
            activations = self._probe.peak(step)
        except torch.OutOfMemoryError as error:
            activations, cause = loaded.free, error.with_traceback(None)  # that would keep the tensors
        left = max(0, loaded.share(self._utilization) - activations)
        if left < least:
            raise ModelLoadError(
                f"{self._model} leaves too little memory for its KV cache on {self._device}: {self._allowance(loaded)} "
                f"besides its weights of {_gb(self._weights)}; a step takes {_gb(activations)}"
                f"{' and more' if cause else ''}, which leaves {_gb(left)}, and KV needs {_gb(least)}: give a smaller "
                f"max_num_batched_tokens, max_num_seqs or max_model_len, {_WAYS_OUT}"
            ) from cause
        return left

    def _refuse(self, before: Room, needed: int, cause: Exception | None = None) -> NoReturn:
        raise ModelLoadError(
            f"{self._model} does not fit on {self._device}: its weights take about {_gb(needed)}, and "
            f"{self._allowance(before)}: give {_WAYS_OUT}"
        ) from (cause and cause.with_traceback(None))

    def _allowance(self, room: Room) -> str:
        return (
            f"of {_gb(room.total)}, of which {_gb(room.free)} are free, gpu_memory_utilization={self._utilization} "
            f"allows {_gb(room.share(self._utilization))}"
        )


_WAYS_OUT = (
    "a smaller dtype or quantization, another device or a higher gpu_memory_utilization, or end what else runs there"
)


def has_own_memory(device: str) -> bool:
    """Whether ``device`` computes in other memory than the main memory."""
    return device != "cpu"


def memory_of(device: str, model: str, utilization: float) -> Memory:
    """Where ``device`` computes; ``model`` is named in messages."""
    if has_own_memory(device):
        return DeviceMemory(device, model, utilization, GPUProbe(device))
    return MainMemory(model)


class StepSize(NamedTuple):
    """The largest step: its tokens, the sequences that they may be of, and a sequence's tokens at most."""

    tokens: int
    sequences: int
    longest: int


def run_step(
    runner_of: Callable[[KVPool], ModelRunner], geometry: KVGeometry, block_size: int, device: str, size: StepSize
) -> None:
    """Run a step of ``size`` whose sequences all sample a token, with KV for one layer, which all layers use."""
    count = min(size.sequences, size.tokens)
    lengths = [min(size.longest, size.tokens // count + (n < size.tokens % count)) for n in range(count)]
    blocks = sum(-(-length // block_size) for length in lengths)
    blocks += max(blocks, count)  # the scheduler keeps some back
    pool = KVPool(replace(geometry, num_layers=1), blocks, block_size, device)
    pool.layers *= geometry.num_layers
    cache = TieredCache(blocks, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(cache, create_policy("fcfs"), max_num_seqs=count, max_num_batched_tokens=size.tokens)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)  # the longest way
    for number, length in enumerate(lengths):
        scheduler.add(Sequence(Request(f"profile-{number}", number, [0] * length, params, b"", 0.0, 1, 0)))
    plan = scheduler.schedule(0.0)
    assert [chunk.length for chunk in plan.chunks] == lengths, "the step was meant to be whole"
    runner = runner_of(pool)
    runner.execute(plan)  # what comes out does not matter here
    runner.ops.tiles_used = runner.ops.tiles_read = 0  # counted from the first request on


def free_memory() -> int:
    """Bytes of main memory this process can still get; where the system does not say, half of what it has."""
    available = _available_memory()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if available is None else available


def _available_memory() -> int | None:
    """Without swap, and with what files take in memory only for speed; None: the system does not say."""
    available = _memory_info("MemAvailable")
    return None if available is None else min(available, _container_memory(available))


def _swap() -> int:
    return _memory_info("SwapFree") or 0


def _memory_info(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _container_memory(unlimited: int, group: Path = Path("/sys/fs/cgroup")) -> int:
    """What the container's limit (cgroup v2) leaves; ``unlimited`` without one."""
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = sum(int(stat[name]) for name in ("active_file", "inactive_file"))  # make room when it is needed
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return unlimited
    return max(0, most - max(0, used - files))  # one that was lowered may be exceeded


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
