"""Numbers to the device without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """``values`` as a tensor on ``device``; on the CPU it shares their memory.

    To a GPU the copy is queued behind the work that is under way there: from pinned memory, which torch keeps until the
    copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
