"""Which of a node's first processes are forked from templates: a function of their settings."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.shared.config import EngineConfig
from server.config import ServeConfig


class Forked(NamedTuple):
    """Of which kinds of process this node has a template at its start."""

    engines: bool
    front_ends: bool


def forked(
    config: ServeConfig, engines: Sequence[EngineConfig], *, can_fork: bool, devices: int
) -> Forked:
    """Return what is forked; a template for one process alone would gain nothing.

    Args:
        engines: settings of each engine of this node.
        can_fork: whether the system has what it takes.
        devices: how many CUDA devices engines see.
    """
    if config.supervisor.start_method == "exec" or not can_fork:
        return Forked(engines=False, front_ends=False)
    return Forked(
        engines=config.ray.data_parallel_backend == "mp"
        and len(engines) > 1
        and all(_can_be_forked(each, devices) for each in engines),
        front_ends=config.supervisor.api_server_count > 1,
    )


def _can_be_forked(config: EngineConfig, devices: int) -> bool:
    """Whether an engine computes itself, on CPUs, and on any of them.

    Drivers of accelerators do not outlive a fork, workers of an engine are started by it, and
    the threads of LLVM's OpenMP runtime keep to the CPUs that it found where it was loaded.
    """
    on_cpu = config.model.device == "cpu" or (config.model.device == "auto" and not devices)
    has_model = config.executor.executor == "model"
    is_bound = bool(config.executor.bound_to)
    return on_cpu and has_model and not is_bound and config.parallel.processes == 1
