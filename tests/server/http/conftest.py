import pytest
import uvloop

from tests.server.conftest import RunLoop


@pytest.fixture
def run_loop() -> RunLoop:
    """The event loop of front ends."""
    return uvloop.run
