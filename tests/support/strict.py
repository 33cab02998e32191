"""`pytest --strict-device`: engines compute on a device that there is not.

Whatever a test tells them, they and their workers are on the device of `strict_device`, in the
test's own process and in those that it starts. Front ends and whole stacks are as always.
"""

import pytest


def add_option(parser: pytest.Parser) -> None:
    """Add `--strict-device`."""
    parser.addoption(
        "--strict-device",
        action="store_true",
        help="have engines compute on a device that there is not, as strict as CUDA and NCCL",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about processors alone."""
    if config.getoption("strict_device"):
        left_out = [item for item in items if item.get_closest_marker("processor")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def configure(config: pytest.Config) -> None:
    """Replace the processor by the device."""
    if config.getoption("strict_device"):
        from engine.executor import worker_process  # nothing of these is needed for other tests
        from tests.engine import processes
        from tests.engine.distributed import strict_device

        strict_device.install()
        strict_device.replace_processors()
        worker_process.WORKER_MODULE = "tests.engine.executor.strict_worker"
        processes.ARGUMENTS = ("device",)
