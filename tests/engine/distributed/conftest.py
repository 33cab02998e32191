"""Processes that form groups."""

from collections.abc import Iterator

import pytest

from tests.engine.processes import World


@pytest.fixture(scope="module", params=["processor", "device"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Members of groups that exchange integers and tensors: of processors, and of devices.

    There are no such devices: see `strict_device`.
    """
    made = World("tests.engine.distributed.member", request.param)
    yield made
    made.end()
