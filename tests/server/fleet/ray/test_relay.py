"""What an engine is told on the node of its actor, which is not the supervisor's."""

import os
from pathlib import Path

from engine.shared.config import BUNDLED_MODEL, ClusterConfig, EngineConfig, ModelConfig
from server.fleet.ray.messages import ActorLaunch
from server.fleet.ray.relay import in_memory, settled


def launch(model: str) -> ActorLaunch:
    config = EngineConfig(
        model=ModelConfig(model=model),
        cluster=ClusterConfig(
            coordinator="head:7550", node="head", advertise_host="head", socket_dir="/of/head",
            cluster_key_file="/of/head/key",
        ),
    )  # fmt: skip
    return ActorLaunch("engine 0", config, 1, {}, b"secret", "/of/head/bundled_model")


def test_the_key_is_a_file_on_no_disk() -> None:
    key = in_memory(b"a secret")
    assert key is not None
    path = settled(launch("m"), key).cluster.cluster_key_file
    assert path is not None
    assert Path(path).read_bytes() == b"a secret"
    assert not os.fstat(key).st_nlink
    os.close(key)
    assert in_memory(None) is None
    assert settled(launch("m"), None).cluster.cluster_key_file is None


def test_what_belongs_to_the_supervisors_node_stays_there() -> None:
    cluster = settled(launch("m"), None).cluster
    assert cluster == ClusterConfig(coordinator="head:7550")


def test_the_bundled_model_is_that_of_the_node() -> None:
    assert settled(launch("/of/head/bundled_model"), None).model.model == str(BUNDLED_MODEL)
    assert settled(launch("/models/m"), None).model.model == "/models/m"
