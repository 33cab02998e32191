"""Processes that form groups."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.processes import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Members of groups that exchange integers and tensors."""
    made = World(Path(__file__).parent / "member.py")
    yield made
    made.end()
