"""The settings of an engine on its actor's node, which differs from the supervisor's."""

import asyncio
import os
import socket
from pathlib import Path

import msgspec
import pytest

from engine.shared.config import BUNDLED_MODEL, ClusterConfig, EngineConfig, ModelConfig
from server.config import FrontEndConfig, HttpConfig
from server.fleet.ray.messages import ActorLaunch
from server.fleet.ray.relay import adapted, in_memory, start_program

AT_HEAD = "/of/head/bundled_model"


def config_of(model: str) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model),
        cluster=ClusterConfig(
            coordinator="head:7550", node="head", advertise_host="head", socket_dir="/of/head",
            cluster_key_file="/of/head/key",
        ),
    )  # fmt: skip


def test_cluster_key_is_an_in_memory_file() -> None:
    key = in_memory(b"a secret")
    assert key is not None
    path = adapted(config_of("m"), AT_HEAD, key, "10.0.0.2").cluster.cluster_key_file
    assert path is not None
    assert Path(path).read_bytes() == b"a secret"
    assert not os.fstat(key).st_nlink
    os.close(key)
    assert in_memory(None) is None
    assert adapted(config_of("m"), AT_HEAD, None, "10.0.0.2").cluster.cluster_key_file is None


def test_node_specific_settings_are_not_sent() -> None:
    cluster = adapted(config_of("m"), AT_HEAD, None, "10.0.0.2").cluster
    assert cluster == ClusterConfig(coordinator="head:7550", node="10.0.0.2")


def test_bundled_model_path_is_that_of_the_node() -> None:
    assert adapted(config_of(AT_HEAD), AT_HEAD, None, "10.0.0.2").model.model == str(BUNDLED_MODEL)
    assert adapted(config_of("/models/m"), AT_HEAD, None, "10.0.0.2").model.model == "/models/m"


def test_api_server_with_address_in_use_gives_advice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = HttpConfig(port=taken.getsockname()[1])
        config = FrontEndConfig(http=http)
        order = ActorLaunch(
            name="api on here", api_server=config, incarnation=1, environment={}, cluster_key=None,
            node="10.0.0.2",
        )  # fmt: skip
        with pytest.raises(OSError, match=r"cannot listen on .*; choose another --port"):
            asyncio.run(start_program(msgspec.msgpack.encode(order), lambda _: None))
