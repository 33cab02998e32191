"""`pytest --strict-device`: engines compute on a simulated strict device.

Regardless of a test's settings, engines and workers use the device of `strict_device`, in the test
process and its children. Front ends and whole stacks are unaffected.
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
    """Deselect tests that are only about processors, or about the kernels of real devices."""
    if config.getoption("strict_device"):
        markers = ("processor", "real_device")
        left_out = [item for item in items if any(map(item.get_closest_marker, markers))]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def configure(config: pytest.Config) -> None:
    """Replace the CPU by the device."""
    if config.getoption("strict_device"):
        from engine.executor import worker_process  # other tests do not need these
        from tests.engine import processes
        from tests.engine.distributed import strict_device

        strict_device.install()
        strict_device.replace_processors()
        worker_process.WORKER_MODULE = "tests.engine.executor.strict_worker"
        processes.ARGUMENTS = ("device",)
