"""Settings that the nodes of an engine must agree on."""

import hashlib
from pathlib import Path

from engine.shared.config import EngineConfig
from engine.shared.group_config import group_config
from engine.shared.model_files import model_directory

NODES_TIMEOUT = 600.0
"""Seconds that an engine waits for its nodes, or a node for its engine."""

STARTING_PATIENCE = 60.0
"""Seconds that an engine may be silent while it starts: while libraries load, the thread that talks
to the nodes runs only intermittently."""

_SHOWN_DIGITS = 16
_SHOWN_LETTERS = 200
"""Maximum characters shown of a node's value in messages for users."""


class CannotSpan(ValueError):
    """An engine cannot span nodes with these settings; the message is for users."""


def agreement(config: EngineConfig) -> dict[str, str]:
    """Return the settings that must be equal on all nodes of an engine, by name.

    Raises:
        CannotSpan: the engine cannot span nodes.
        ModelNotFound: there is no such model.
    """
    if config.executor.executor == "simulated":
        raise CannotSpan("--nnodes needs --executor model: a simulated engine has no workers")
    described = model_directory(config.model, weights=False) / "config.json"
    digest = hashlib.sha256(described.read_bytes()).hexdigest()[:_SHOWN_DIGITS]
    parallel = config.parallel
    return {
        "nnodes": str(parallel.nnodes),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_layer_partition": str(parallel.layers_of_stages),
        **group_config(config),
        "config.json of the model": digest,
        "device": config.model.device,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "max_loras": str(config.lora.max_loras),
        "speculative_model": Path(config.scheduler.speculative_model or "").name,
        "speculative_method": config.scheduler.speculative_method,
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str | None:
    """Return the first difference between the first node (`here`) and another; None if none."""
    for name in (*here, *(name for name in there if name not in here)):
        local, remote = here.get(name, "not known"), there.get(name, "not known")
        if local != remote:
            shown = (each[:_SHOWN_LETTERS] for each in (name, local, remote))
            return "{} is {} on the first node but {} there".format(*shown)
    return None
