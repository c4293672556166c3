"""Work aside: in which order streams and events are called, and the copies themselves, between two storages."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from foreword.kv.cache import KVCacheManager
from foreword.kv.host import CacheStore, OwnMemory
from foreword.kv.pool import KVGeometry, KVPool
from foreword.kv.tiers import TieredCache
from foreword.ops.triton.backend import TritonOps
from foreword.ops.triton.streams import SideStreams

from .pages import DEVICE

SIZE = 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_down_and_up_again(dtype: torch.dtype) -> None:
    """Blocks go to a second storage, are evicted and overwritten, and come back to other places with the same bits."""
    geometry = KVGeometry(2, 1, 12, dtype)
    pool = KVPool(geometry, 8, SIZE, DEVICE)
    memory = OwnMemory(KVPool(geometry, 12, SIZE, pinned=DEVICE == "cuda"), TritonOps(torch.float32, DEVICE))
    cache, host = TieredCache(8, SIZE), KVCacheManager(12, SIZE)
    cache.put_on(CacheStore(pool, host, takes=True, memory=memory))
    rng = random.Random(3)
    prompts = [rng.choices(range(9), k=length) for length in (40, 33, 48)]

    def compute(tokens: list[int], seed: int) -> torch.Tensor:
        held = cache.allocate(b"", cache.lookup(b"", tokens, 0), len(tokens))
        kv = torch.randint(0, 120, (*pool.data.shape[:3], len(tokens), pool.data.shape[4]), generator=seeded(seed))
        for position in range(len(tokens)):
            place = held.blocks[position // SIZE] * SIZE + position % SIZE
            pool.data[..., place, :] = kv[..., position, :].to(dtype).to(DEVICE)
        cache.retire(held, tokens, len(tokens))
        cache.settle()
        return kv.to(dtype)

    expected = [compute(tokens, seed) for seed, tokens in enumerate(prompts)]
    assert cache.lookup(b"", prompts[0], 40).num_tokens < 40, "the pool was meant to be too small"
    cache._evict(cache.allocator.num_evictable)
    pool.data.view(torch.uint8).fill_(255)
    for tokens, kv in zip(reversed(prompts), reversed(expected), strict=True):
        cache._evict(cache.allocator.num_evictable)
        cache.fetch(b"", tokens, cache.lookup(b"", tokens, len(tokens)), None)
        cache.settle()
        match = cache.lookup(b"", tokens, len(tokens))
        assert match.num_tokens == len(tokens)
        places = [match.all_blocks[at // SIZE] * SIZE + at % SIZE for at in range(len(tokens))]
        assert torch.equal(pool.data[..., places, :].cpu().view(torch.uint8), kv.view(torch.uint8))
    cache.check_integrity()
    host.check_integrity()
    cache.close()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Calls(list[str]):
    """Doubles of torch's streams and events that note what is called, each by a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        calls, made = self, iter(range(99))

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                self.name = f"event {next(made)}{', blocking' if blocking else ''}"

            def record(self, stream: Any) -> None:
                calls.append(f"{self.name}: recorded on {stream}")

            def synchronize(self) -> None:
                calls.append(f"{self.name}: waited for")

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = f"stream {next(made)} of {device}"

            def __str__(self) -> str:
                return self.name

            def wait_event(self, event: Event) -> None:
                calls.append(f"{self}: behind {event.name}")

        @contextmanager
        def entered(stream: Stream) -> Iterator[None]:
            calls.append(f"{stream}: entered")
            yield
            calls.append(f"{stream}: left")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current stream of {device}")


def test_the_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What began first is waited for by the side's stream alone; and its own work by the thread, after an error too."""
    calls = Calls(monkeypatch)
    streams = SideStreams(torch.device("cuda:1"))
    first, second = streams.aside(), streams.aside()
    begun = ["event 0: recorded on the current stream of cuda:1", "event 1: recorded on the current stream of cuda:1"]
    assert calls == begun, "nothing waits"
    with first:
        calls.append("work")
    with pytest.raises(OSError, match="planted"), second:
        raise OSError("planted")
    stream = "stream 2 of cuda:1"
    assert calls[2:] == [
        f"{stream}: behind event 0", f"{stream}: entered", "work", f"event 3, blocking: recorded on {stream}",
        "event 3, blocking: waited for", f"{stream}: left",
        f"{stream}: behind event 1", f"{stream}: entered", f"event 4, blocking: recorded on {stream}",
        "event 4, blocking: waited for",
    ]  # fmt: skip


def test_each_thread_has_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what comes up does not wait for what goes down."""
    calls = Calls(monkeypatch)
    streams = SideStreams(torch.device("cuda"))

    def work() -> None:
        for _ in range(2):
            with streams.aside():
                pass

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len({call for call in calls if call.endswith("entered")}) == 2


def test_pinned_memory_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered where it lies, and not for longer than it lies there; what the driver refuses is an error."""
    calls, results = list[tuple[Any, ...]](), [0, 2]

    class Driver:
        def cudaHostRegister(self, *args: int) -> int:
            calls.append(args)
            return results.pop(0)

        def cudaHostUnregister(self, *args: int) -> None:
            calls.append(args)

    def check(result: int) -> None:
        if result:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    geometry = KVGeometry(2, 1, 12, torch.bfloat16)
    pool = KVPool(geometry, 4, SIZE, pinned=True)
    place = pool.data.data_ptr()
    assert calls == [(place, 2 * 2 * 12 * 2 * 4 * SIZE, 3)]
    del pool
    assert calls[1:] == [(place,)]
    with pytest.raises(RuntimeError, match="out of memory"):
        KVPool(geometry, 4, SIZE, pinned=True)
    assert len(calls) == 3, "what was not registered is not let go of"
