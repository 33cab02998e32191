"""Which CPUs a node's processes get, by its settings and what the machine has."""

import os

import msgspec

from engine.shared.config import EngineConfig
from engine.shared.cpu.machine import read_topology
from engine.shared.cpu.plan import CpuPlan, Wish, make_plan
from server.fleet.capacity import visible_devices


def plan_cpus(
    config: EngineConfig,
    *,
    others: int = 0,
    devices: int | None = None,
) -> CpuPlan:
    """Return where a node's processes run.

    Args:
        config: of all its engines.
        others: how many front ends and coordinators run beside them.
        devices: how many CUDA devices engines see; default: as many as there are.

    Raises:
        BadCpuBind: the lists of `--cpu-bind` do not fit the machine or the engines.
    """
    executor, device = config.executor, config.model.device
    if devices is None:
        devices = visible_devices(os.environ)
    on_cpu = device == "cpu" or (device == "auto" and not devices)
    wish = Wish(
        bind=executor.cpu_bind,
        engines=config.parallel.engines_on_node,
        processes=config.parallel.processes_on_node,
        others=others,
        threads=executor.threads,
        on_cpu=on_cpu and executor.executor == "model",
    )
    return make_plan(wish, None if executor.cpu_bind == "none" else read_topology())


def of_engine_alone(config: EngineConfig) -> EngineConfig:
    """Return the settings, with its own CPUs, of an engine that no supervisor started.

    Raises:
        BadCpuBind: the lists of `--cpu-bind` do not fit the machine or the engines.
    """
    own = plan_cpus(config).of_engine(config.parallel.number_on_node)
    executor = msgspec.structs.replace(config.executor, cpu_bind=own)
    return msgspec.structs.replace(config, executor=executor)
