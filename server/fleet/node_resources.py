"""A node's resources for its processes: CUDA devices, engine capacity, CPUs."""

import os
from collections.abc import Mapping
from pathlib import Path

from engine.shared.config import EngineConfig
from engine.shared.cpu.machine import read_topology
from engine.shared.cpu.plan import BindRequest, CpuPlan, make_plan
from server.config import ServeConfig
from server.router.load_table import MAX_ENGINES

_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_devices(environment: Mapping[str, str], driver: Path = _DRIVER) -> int:
    """Return the number of CUDA devices visible to engines, without loading CUDA."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    if visible is None:
        return present
    named = [entry.strip() for entry in visible.split(",")]
    # CUDA ignores the list from the first invalid entry on.
    valid = next((i for i, entry in enumerate(named) if entry in ("", "-1")), len(named))
    return min(present, valid)


def engine_capacity(config: ServeConfig, devices: int) -> int:
    """Return the maximum number of engines on a node with this many CUDA devices.

    0 if the configured number is 0; a larger configured number than seems to fit is accepted.
    """
    parallel = config.parallel
    configured = parallel.engines_on_node
    if not configured or parallel.data_parallel_lb == "external":
        return configured
    on_cpu = config.model.device == "cpu" or config.executor.executor == "simulated"
    if on_cpu or not devices:
        return MAX_ENGINES
    return max(configured, devices // parallel.processes)


def plan_cpus(
    config: EngineConfig,
    *,
    others: int = 0,
    devices: int | None = None,
) -> CpuPlan:
    """Return the CPU placement of a node's processes.

    Args:
        config: settings of all of its engines.
        others: number of front ends and coordinators on the node.
        devices: number of CUDA devices visible to engines; default: detected.

    Raises:
        BadCpuBind: the lists of `--cpu-bind` do not fit the machine or the engines.
    """
    executor, device = config.executor, config.model.device
    if devices is None:
        devices = visible_devices(os.environ)
    on_cpu = device == "cpu" or (device == "auto" and not devices)
    request = BindRequest(
        bind=executor.cpu_bind,
        engines=config.parallel.engines_on_node,
        processes=config.parallel.processes_on_node,
        others=others,
        threads=executor.threads,
        on_cpu=on_cpu and executor.executor == "model",
    )
    return make_plan(request, None if executor.cpu_bind == "none" else read_topology())


def of_standalone_engine(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine without a supervisor, bound to its own CPUs.

    Raises:
        BadCpuBind: the lists of `--cpu-bind` do not fit the machine or the engines.
    """
    own = plan_cpus(config).of_engine(config.parallel.number_on_node)
    return config.changed(executor={"cpu_bind": own})
