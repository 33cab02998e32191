"""The part of an actor that is made of this project's code: the engine below it."""

import os
from collections.abc import Callable

import msgspec

from engine.shared.config import BUNDLED_MODEL, EngineConfig, EngineLaunch
from server.fleet.child import Child
from server.fleet.holder import Program
from server.fleet.ray.messages import ActorEvent, ActorLaunch, Line


async def start_engine(frame: bytes, tell: Callable[[ActorEvent], None]) -> Child:
    """Start an engine below this process.

    Raises:
        OSError: the process cannot be created (no interpreter, memory or process id).
    """
    launch = msgspec.msgpack.decode(frame, type=ActorLaunch)
    key = in_memory(launch.cluster_key)
    try:
        config = settled(launch, key)
        program = Program(
            name=launch.name,
            module="engine",
            launch=EngineLaunch(config, launch.incarnation),
            environment=launch.environment,
            inherit=[] if key is None else [key],
        )
        return await Child.start(program, on_status=tell, on_line=lambda line: tell(Line(line)))
    finally:
        if key is not None:
            os.close(key)  # the engine has its own


def in_memory(secret: bytes | None) -> int | None:
    """Return a descriptor of a file with the secret that lies on no disk."""
    if secret is None:
        return None
    descriptor = os.memfd_create("swell-cluster-key")
    os.write(descriptor, secret)
    return descriptor


def settled(launch: ActorLaunch, key: int | None) -> EngineConfig:
    """Return the engine's settings with what is different on this node."""
    config = launch.config
    path = None if key is None else f"/proc/self/fd/{key}"
    cluster = msgspec.structs.replace(
        config.cluster, cluster_key_file=path, socket_dir=None, node=None, advertise_host=None
    )
    model = config.model
    if model.model == launch.bundled_model:
        model = msgspec.structs.replace(model, model=str(BUNDLED_MODEL))
    return msgspec.structs.replace(config, cluster=cluster, model=model)
