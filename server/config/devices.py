"""Defaults of settings that follow the CUDA devices of a machine."""

from typing import Any

from engine.shared.config import EngineConfig
from server.config.commands import ServeConfig

_CUDA: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 64}


def defaults_for(config: ServeConfig | EngineConfig, num_devices: int) -> dict[str, Any]:
    """Return the defaults that differ from those for processors, by the setting's name.

    Args:
        config: what is set, and the other settings' defaults.
        num_devices: CUDA devices that engines here would see.
    """
    on_cpu = config.model.device == "cpu" or config.executor.executor == "simulated"
    if on_cpu or not num_devices:
        return {}
    found = dict(_CUDA)
    parallel = config.parallel
    is_one_node = (
        isinstance(config, ServeConfig)
        and config.nodes.data_parallel_address is None
        and config.ray.data_parallel_backend == "mp"
        and parallel.nnodes == 1
        and parallel.data_parallel_size_local is None
        and parallel.data_parallel_rank is None
    )
    if is_one_node:
        found["data_parallel_size"] = max(1, num_devices // parallel.processes)
    return found
