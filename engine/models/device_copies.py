"""Arrays of a step on their way to where the model computes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy an array, without waiting for the copy where the device has a stream of its own."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def refill(target: Tensor, array: np.ndarray[Any, Any]) -> None:
    """Write an array over a tensor of its shape, which recorded steps read, without waiting."""
    target.copy_(to_device(array, target.device), non_blocking=True)
