from collections.abc import Iterator

import pytest

from benchmarks.running_stack import RunningStack
from tests.vllm.stacks import vllm_stack


@pytest.fixture(scope="session")
def served() -> Iterator[RunningStack]:
    with vllm_stack() as running:
        yield running
