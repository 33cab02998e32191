"""Threads for tiny tensors."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from more, and threads that wait for a busy core lose much."""
    torch.set_num_threads(1)
