"""How many threads torch uses, per thread."""

from __future__ import annotations

import threading

import torch

_LOCK = threading.Lock()


def use_torch_threads(count: int) -> None:
    """Have torch's operations run on ``count`` threads when the calling thread calls them; other threads keep theirs.

    ``torch.set_num_threads`` changes the calling thread's number, and with it what threads start with that have not
    used torch yet. The second is put back, by a thread of its own.
    """
    with _LOCK:
        before = torch.get_num_threads()
        if count == before:
            return
        torch.set_num_threads(count)
        helper = threading.Thread(target=torch.set_num_threads, args=(before,))
        helper.start()
        helper.join()
