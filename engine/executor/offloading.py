"""Weights offloaded to host memory while their engine sleeps."""

import logging
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """A copy of the bytes of a storage, which is only resized."""

    storage: torch.UntypedStorage
    device: torch.device
    host: Tensor


class OffloadedWeights:
    """Pinned host copies of tensors whose device memory is freed."""

    def __init__(self, copies: list[_Copy]) -> None:
        """Take ownership of copies, and free the device memory."""
        self._copies = copies
        for each in copies:
            each.storage.resize_(0)

    @torch.inference_mode()
    def restore(self) -> None:
        """Refill the same tensors, at other addresses; the copies are used up."""
        for storage, device, host in self._copies:
            storage.resize_(host.nbytes)
            _bytes_of(storage, device).copy_(host, non_blocking=True)
        _wait_for({each.device for each in self._copies})
        self._copies = []


@torch.inference_mode()
def offload(models: Iterable[nn.Module | None], device: torch.device) -> OffloadedWeights | None:
    """Move the parameters and buffers of some models from a device to the host.

    Tensors that share memory still do so afterwards. Returns None, with nothing changed, if the
    host has too little memory.
    """
    storages = {}
    for model in models:
        if model is None:
            continue
        for each in chain(model.parameters(), model.buffers()):
            if each.device.type == device.type:
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage, each.device
    pins = device.type == "cuda"
    try:
        copies = [
            _Copy(*held, torch.empty(held[0].nbytes(), dtype=torch.uint8, pin_memory=pins))
            for held in storages.values()
        ]
    except RuntimeError as error:
        logger.warning("weights are not kept in the host's memory: %s", error)
        return None
    for storage, on, host in copies:
        host.copy_(_bytes_of(storage, on), non_blocking=True)
    _wait_for({each.device for each in copies})
    return OffloadedWeights(copies)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
