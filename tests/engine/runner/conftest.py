"""Threads for tiny tensors."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from more, and threads that wait for a busy core lose much."""
    if torch := sys.modules.get("torch"):  # quick tests of this package have none
        torch.set_num_threads(1)
