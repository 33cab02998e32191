"""The Ray resources that one rank needs, derived from its settings, and version checks.

The only I/O is querying the installed versions.
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
"""Node-specific variables that are never copied."""


def rank_resources(config: EngineConfig, ray: RayConfig, *, has_gpus: bool) -> Resources:
    """Return the needs of one rank as one bundle, as its processes share a node.

    Args:
        has_gpus: whether any node of the cluster has GPUs, which `--device auto` then uses.

    Raises:
        CannotServe: `--ray-engine-resources` is not a JSON object of numbers.
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
        extra = msgspec.json.decode(ray.ray_engine_resources, type=dict[str, float])
    except msgspec.DecodeError as error:
        raise CannotServe(
            f'--ray-engine-resources must be a JSON object of numbers, like {{"slot": 1}}: {error}'
        ) from error
    wrong = [name for name, amount in extra.items() if not 0 < amount < float("inf")]
    if wrong:
        raise CannotServe(f"--ray-engine-resources: the amount of {wrong[0]} is not positive")
    return needs | extra


def cpus(config: EngineConfig) -> int:
    """Return the number of cores of a rank without GPUs."""
    return config.executor.threads or config.parallel.processes


def uses_gpus(config: EngineConfig, *, has_gpus: bool) -> bool:
    """Return whether a rank needs a GPU for each of its processes."""
    if config.executor.executor == "simulated" or config.model.device == "cpu":
        return False
    return config.model.device == "cuda" or has_gpus


def engine_config(config: EngineConfig, *, gpus: bool, max_engines_per_node: int) -> EngineConfig:
    """Return the settings of an engine that runs in its own bundle.

    Ray shows it only its own devices, so its index on the node is 0; threads equal the requested
    cores. It is not bound to CPUs: Ray counts cores without assigning them.

    Args:
        max_engines_per_node: maximum number of engines that share a node's memory.
    """
    return config.changed(
        parallel={"data_parallel_rank_local": 0, "data_parallel_size_local": max_engines_per_node},
        executor={"cpu_bind": "none"} | ({} if gpus else {"threads": cpus(config)}),
        model={"device": "cuda" if gpus else "cpu"},
    )


def copied_environment(patterns: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the supervisor's variables to copy to engines, by name or pattern (`HF_*`)."""
    return {
        name: value
        for name, value in environment.items()
        if name not in NEVER_COPIED
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def differences(installed: Mapping[str, str], node: str) -> str | None:
    """Return a description of version differences on a node; None if there are none.

    Args:
        installed: the versions that its actor reports.
    """
    expected = {"swell": SWELL_VERSION, "torch": _torch()}
    differing = [
        f"{name} {installed.get(name, 'none')} there, {version} here"
        for name, version in expected.items()
        # A head node without torch has no version to compare.
        if version != "none" and installed.get(name) != version
    ]
    if not differing and installed.get("relay", "").startswith("none"):
        differing = [f"no Ray backend there: {installed['relay']}"]
    if not differing:
        return None
    return f"node {node} has other versions: {'; '.join(differing)}. Install the same on all nodes"


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"
