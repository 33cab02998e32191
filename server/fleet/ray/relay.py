"""The part of an actor that uses this project's code: its child process."""

import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.shared.addresses import listen
from engine.shared.config import BUNDLED_MODEL, EngineConfig, EngineLaunch
from engine.shared.messages import ChildHeartbeat, ChildStatus
from server.config import FrontEndConfig, HttpConfig
from server.fleet.child import Child, Program
from server.fleet.ray.messages import ActorEvent, ActorLaunch, Line

_BACKLOG = 2048

Config = TypeVar("Config", EngineConfig, FrontEndConfig)


async def start_program(frame: bytes, report: Callable[[ActorEvent], None]) -> Child:
    """Start an engine or an API server as a child of this process.

    Raises:
        OSError: the process cannot be created (no interpreter, memory or process id), or the
            address of an API server is taken.
    """
    launch = msgspec.msgpack.decode(frame, type=ActorLaunch)
    key = in_memory(launch.cluster_key)
    inherit = [] if key is None else [key]
    try:
        module, interpreter = "server", None
        if launch.engine is not None:
            module, interpreter = "engine", launch.engine.executor.engine_python
            config = adapted(launch.engine, launch.bundled_model, key, launch.node)
            parameters: object = EngineLaunch(config, launch.incarnation)
        else:
            assert launch.api_server is not None, "there is nothing to start"
            inherit.append(_listening(launch.api_server.http))
            # The fields of `server.front_end.FrontEndLaunch`, whose module would load the HTTP
            # stack.
            parameters = {
                "config": adapted(launch.api_server, launch.bundled_model, key, launch.node),
                "index": -1,
                "incarnation": launch.incarnation,
                "socket_dir": "",
                "listen_fd": inherit[-1],
            }

        def on_status(status: ChildStatus) -> None:
            if not isinstance(status, ChildHeartbeat):  # would wake the supervisor every second
                report(status)

        return await Child.start(
            Program(
                name=launch.name,
                module=module,
                interpreter=interpreter,
                launch=parameters,
                environment=launch.environment,
                inherit=inherit,
                on_status=on_status,
                on_line=lambda line: report(Line(line)),
            )
        )
    finally:
        for descriptor in inherit:
            os.close(descriptor)  # the program has inherited a copy


def _listening(http: HttpConfig) -> int:
    try:
        listener: socket.socket = listen(http.host, http.port, _BACKLOG)
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"cannot listen on {http.address}: {why}; choose another --port") from error
    listener.setblocking(False)
    return listener.detach()


def in_memory(secret: bytes | None) -> int | None:
    """Return a descriptor of an in-memory file that contains the secret; None without one."""
    if secret is None:
        return None
    descriptor = os.memfd_create("swell-cluster-key")
    os.write(descriptor, secret)
    return descriptor


def adapted(config: Config, bundled_model: str, key: int | None, node: str) -> Config:
    """Return the settings adapted to this node.

    Args:
        bundled_model: path of the bundled model on the supervisor's node.
        key: descriptor of the cluster key.
        node: this node's name.
    """
    path = None if key is None else f"/proc/self/fd/{key}"
    model = config.model.model
    return config.changed(
        cluster={
            "cluster_key_file": path, "socket_dir": None, "node": node, "advertise_host": None
        },
        model={"model": str(BUNDLED_MODEL) if model == bundled_model else model},
    )  # fmt: skip
