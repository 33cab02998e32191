"""One cluster of three nodes for all tests that leave it as it was."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ray.nodes import Nodes

if find_spec("ray") is None:
    # `make test` does without; `make test-ray` installs it, and fails where it finds no test.
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def nodes() -> "Iterator[Nodes]":
    """A head and two more nodes with two places each, none of which is taken."""
    from tests.ray.nodes import Nodes

    with Nodes(2, 2, 2) as cluster:
        yield cluster
