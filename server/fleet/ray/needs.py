"""The resources that one rank asks of a Ray cluster, by its engine's settings, and the versions.

The only I/O is to look at what is installed.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from importlib import metadata

import msgspec

from engine.shared.config import EngineConfig
from engine.shared.version import SWELL_VERSION
from server.config import RayConfig
from server.fleet.backend import CannotServe
from server.fleet.ray.packing import Resources

NEVER_COPIED = frozenset(
    {"CUDA_VISIBLE_DEVICES", "PATH", "HOME", "HOSTNAME", "PYTHONPATH", "LD_LIBRARY_PATH"}
)
"""Variables that belong to a node, whatever is asked for."""


def needs_of_rank(config: EngineConfig, ray: RayConfig, *, has_gpus: bool) -> Resources:
    """Return what one rank needs: one bundle, as its processes share a node.

    Args:
        has_gpus: whether any node of the cluster has GPUs, which `--device auto` takes then.

    Raises:
        CannotServe: `--ray-engine-resources` is no object of numbers.
    """
    processes = config.parallel.processes
    memory = ray.ray_engine_memory
    if uses_gpus(config, has_gpus=has_gpus):
        needs = {"CPU": float(processes), "GPU": float(processes)}
    else:
        needs = {"CPU": float(cpus(config))}
        memory = memory or config.cache.kv_cache_memory_bytes
    if memory:
        needs["memory"] = float(memory)
    try:
        own = msgspec.json.decode(ray.ray_engine_resources, type=dict[str, float])
    except msgspec.DecodeError as error:
        raise CannotServe(
            f'--ray-engine-resources must be a JSON object of numbers, like {{"slot": 1}}: {error}'
        ) from error
    wrong = [name for name, amount in own.items() if not 0 < amount < float("inf")]
    if wrong:
        raise CannotServe(f"--ray-engine-resources: the amount of {wrong[0]} is not positive")
    return needs | own


def cpus(config: EngineConfig) -> int:
    """Return how many cores a rank without GPUs computes with."""
    return config.executor.threads or config.parallel.processes


def uses_gpus(config: EngineConfig, *, has_gpus: bool) -> bool:
    """Whether a rank needs a GPU for each of its processes."""
    if config.executor.executor == "simulated" or config.model.device == "cpu":
        return False
    return config.model.device == "cuda" or has_gpus


def engine_config(config: EngineConfig, *, gpus: bool, most_on_node: int) -> EngineConfig:
    """Return the settings of an engine that runs in bundles of its own.

    Ray shows it only its own devices, so it counts as the first engine of its node; threads are
    the cores that it asked for. It is not bound to any: Ray counts cores and does not say which.

    Args:
        most_on_node: how many engines may share a node's memory.
    """
    return config.changed(
        parallel={"data_parallel_rank_local": 0, "data_parallel_size_local": most_on_node},
        executor={"cpu_bind": "none"} | ({} if gpus else {"threads": cpus(config)}),
        model={"device": "cuda" if gpus else "cpu"},
    )


def copied_environment(patterns: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that engines get of the supervisor's, by name or pattern (`HF_*`)."""
    return {
        name: value
        for name, value in environment.items()
        if name not in NEVER_COPIED
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def differences(there: Mapping[str, str], node: str) -> str | None:
    """Return what is different on a node, naming both versions; None if nothing is.

    Args:
        there: what its actor says is installed.
    """
    here = {"swell": SWELL_VERSION, "torch": _torch()}
    found = [
        f"{name} {there.get(name, 'none')} there, {version} here"
        for name, version in here.items()
        # A head node without torch has nothing to compare.
        if version != "none" and there.get(name) != version
    ]
    if not found and there.get("relay", "").startswith("none"):
        found = [f"no Ray backend there: {there['relay']}"]
    if not found:
        return None
    return f"node {node} has other versions: {'; '.join(found)}. Install the same on all nodes"


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"
