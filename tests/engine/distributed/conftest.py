"""Fixtures of processes that form groups."""

from collections.abc import Iterator

import pytest

from tests.engine.processes import World


@pytest.fixture(scope="module", params=["processor", "device"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Group members that exchange integers and tensors, on CPUs and on devices.

    The devices are simulated: see `strict_device`.
    """
    made = World("tests.engine.distributed.member", request.param)
    yield made
    made.end()
