"""Work beside the model, on streams of its own: blocks that go to other memory, or come from there.

No GPU has run this yet; the order of its calls is tested, and the copies themselves without streams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

WHOLE_DEVICE = threading.Lock()
"""Held by whoever captures a graph, waits for a whole device or gives torch's unused memory back to it. While launches
are captured, the others are errors on any thread of the process; what the model's copies wait for is not."""


class SideStreams:
    """A stream for each thread that works aside; none on a CPU, where what was called is done.

    Torch's other threads share the default stream, so what they launch would wait in one queue with the model's passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_thread = threading.local()

    def aside(self) -> AbstractContextManager[None]:
        """See :meth:`foreword.ops.protocol.Ops.aside`. Nothing waits here; who leaves it waits for its own work."""
        if self._device.type != "cuda":
            return nullcontext()
        begun = torch.cuda.Event()
        begun.record(torch.cuda.current_stream(self._device))
        return self._beside(begun)

    @contextmanager
    def _beside(self, begun: torch.cuda.Event) -> Iterator[None]:
        stream = self._stream()
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:  # after an error too: the blocks that it used are let go of
                done = torch.cuda.Event(blocking=True)  # the thread sleeps until then
                done.record(stream)
                done.synchronize()

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            stream = self._of_thread.stream = torch.cuda.Stream(self._device)
        return stream
