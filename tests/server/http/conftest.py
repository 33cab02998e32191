import pytest
import uvloop

from tests.server.conftest import RunLoop


@pytest.fixture
def run_loop() -> RunLoop:
    """Use the front ends' event loop."""
    return uvloop.run
