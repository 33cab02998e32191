"""How tests are spread over the processes of `pytest -n`.

Whole stacks want a core to themselves, so that all tests that start one run one after the other in
one process, which begins with them: they take longest. The other processes take file after file.
"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of stacks first, and all tests into groups for `--dist loadgroup`."""
    items.sort(key=lambda item: item.get_closest_marker("stack") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            is_stack = item.get_closest_marker("stack") is not None
            group = "stacks" if is_stack else item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))
