"""Copies a step's arrays to the model's device."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy an array to the device; asynchronous on CUDA."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def refill(target: Tensor, array: np.ndarray[Any, Any]) -> None:
    """Overwrite a tensor of the same shape, which CUDA graphs read; asynchronous."""
    target.copy_(to_device(array, target.device), non_blocking=True)
