"""How many engines a node can run."""

from collections.abc import Mapping
from pathlib import Path

from server.config import ServeConfig
from server.router.load_table import MAX_ENGINES

_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_devices(environment: Mapping[str, str], driver: Path = _DRIVER) -> int:
    """Return how many CUDA devices engines will see, without loading CUDA."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    if visible is None:
        return present
    named = [entry.strip() for entry in visible.split(",")]
    # CUDA takes entries up to the first that names no device.
    valid = next((i for i, entry in enumerate(named) if entry in ("", "-1")), len(named))
    return min(present, valid)


def engine_capacity(config: ServeConfig, devices: int) -> int:
    """Return how many engines a node with so many CUDA devices can run.

    A node that was told to run none runs none; one that was told to run more than seem to fit
    may run as many.
    """
    parallel = config.parallel
    told = parallel.engines_on_node
    if not told or parallel.data_parallel_lb == "external":
        return told
    on_cpu = config.model.device == "cpu" or config.executor.executor == "simulated"
    if on_cpu or not devices:
        return MAX_ENGINES
    return max(told, devices // parallel.processes)
