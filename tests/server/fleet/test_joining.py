"""The role of a node by its settings, and the number of engines it can run."""

from pathlib import Path
from typing import Any

import pytest

from engine.shared.config import ClusterConfig, ExecutorConfig, ParallelConfig
from server.config import NodesConfig, RayConfig, ServeConfig
from server.fleet.backend import BadNode, check_span, joining
from server.fleet.node_resources import engine_capacity, visible_devices
from server.fleet.roles import engine_role
from server.router.load_table import MAX_ENGINES

LOCAL = "ipc:///tmp/x/coordinator"


def test_single_node_numbers_its_engines() -> None:
    config, leads, is_single_node, _ = joining(ServeConfig(), LOCAL)
    assert (leads, is_single_node) == (True, True)
    assert config.cluster.coordinator_address == LOCAL
    assert engine_role(config, 1).member == ("engine", 1)


def test_head_listens_for_other_nodes_and_coordinator_assigns_ranks() -> None:
    nodes = NodesConfig(data_parallel_address="localhost", data_parallel_rpc_port=29550)
    config, leads, is_single_node, _ = joining(ServeConfig(nodes=nodes), LOCAL)
    assert (leads, is_single_node) == (True, False)
    assert config.cluster.coordinator_address == "tcp://127.0.0.1:29550"
    assert engine_role(config, 1).member == ("engine", -1)


def test_headless_node_joins_head_with_only_engines() -> None:
    nodes = NodesConfig(data_parallel_address="head.example", headless=True)
    config, leads, is_single_node, _ = joining(ServeConfig(nodes=nodes), LOCAL)
    assert (leads, is_single_node) == (False, False)
    assert config.cluster.coordinator_address == "tcp://head.example:7550"
    assert config.supervisor.api_server_count == 0
    assert config.cluster.join_timeout == config.supervisor.startup_timeout == 600


def test_configured_ranks_are_kept_and_later_engines_get_free_ones() -> None:
    parallel = ParallelConfig(data_parallel_size_local=2, data_parallel_start_rank=2)
    config = ServeConfig(parallel=parallel, cluster=ClusterConfig(coordinator="head:7550"))
    found = joining(config, LOCAL)
    assert engine_role(found.config, 1).member == ("engine", 3)
    assert engine_role(found.config, 2, numbered=False).member == ("engine", -1)


@pytest.mark.parametrize(
    ("nodes", "coordinator", "named"),
    [
        (NodesConfig(headless=True), None, "--headless needs --data-parallel-address"),
        (NodesConfig(data_parallel_address="a"), "b:1", "give only one"),
    ],
)
def test_contradictions_are_named(nodes: NodesConfig, coordinator: str | None, named: str) -> None:
    config = ServeConfig(nodes=nodes, cluster=ClusterConfig(coordinator=coordinator))
    with pytest.raises(BadNode, match=named):
        joining(config, LOCAL)


def test_devices_are_counted_without_cuda(tmp_path: Path) -> None:
    assert visible_devices({}, tmp_path / "none") == 0
    for number in range(4):
        (tmp_path / f"0000:0{number}").mkdir()
    assert visible_devices({}, tmp_path) == 4
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1, 3"}, tmp_path) == 2
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, tmp_path) == 1
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0


@pytest.mark.parametrize(
    ("parallel", "devices", "capacity"),
    [
        (ParallelConfig(data_parallel_size=2), 0, MAX_ENGINES),
        (ParallelConfig(data_parallel_size=2), 8, 8),
        (ParallelConfig(data_parallel_size=2, tensor_parallel_size=4), 8, 2),
        (ParallelConfig(data_parallel_size_local=0), 8, 0),
        (ParallelConfig(data_parallel_rank=3, data_parallel_lb="external"), 8, 1),
    ],
)
def test_node_capacity_follows_its_devices(
    parallel: ParallelConfig, devices: int, capacity: int
) -> None:
    assert engine_capacity(ServeConfig(parallel=parallel), devices) == capacity
    simulated = ServeConfig(parallel=parallel, executor=ExecutorConfig(executor="simulated"))
    configured = parallel.engines_on_node
    outside = parallel.data_parallel_lb == "external" or not configured
    assert engine_capacity(simulated, devices) == (configured if outside else MAX_ENGINES)


SPAN = ParallelConfig(
    data_parallel_size=1, pipeline_parallel_size=2, nnodes=2, master_addr="10.0.0.1"
)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            ServeConfig(parallel=SPAN, ray=RayConfig(data_parallel_backend="ray")),
            "leave out --data",
        ),
        (ServeConfig(parallel=SPAN, nodes=NodesConfig(headless=True)), "leave out --headless"),
        (ServeConfig(parallel=SPAN, cluster=ClusterConfig(coordinator="h:1")), "and --coordinator"),
    ],
)
def test_an_engine_that_spans_nodes_is_the_only_one(config: ServeConfig, reason: str) -> None:
    check_span(ServeConfig(parallel=SPAN))
    with pytest.raises(BadNode, match=reason):
        check_span(config)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"nnodes": 2}, "needs --master-addr"),
        ({"node_rank": 1}, "nodes are numbered from 0"),
        ({"nnodes": 2, "master_addr": "h"}, "needs --data-parallel-size 1"),
        ({"nnodes": 2, "master_addr": "10.0.0.1:29501"}, "the port is --master-port"),
        ({"nnodes": 2, "master_addr": ""}, "neither a name nor an address"),
        (
            {
                "nnodes": 2,
                "master_addr": "fd00::1",
                "data_parallel_size": 1,
                "pipeline_parallel_size": 2,
                "enable_expert_parallel": True,
            },
            "cannot be combined with --enable-expert-parallel",
        ),
        (
            {"nnodes": 2, "master_addr": "h", "data_parallel_size": 1},
            "--pipeline-parallel-size 1 cannot be divided by --nnodes 2",
        ),
        (
            {
                "nnodes": 2,
                "master_addr": "h",
                "data_parallel_size": 1,
                "pipeline_parallel_size": 3,
                "tensor_parallel_size": 2,
            },
            "--pipeline-parallel-size 3 cannot be divided by --nnodes 2",
        ),
    ],
)
def test_engines_that_cannot_span_nodes_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ParallelConfig(**settings)


@pytest.mark.parametrize("given", ["data_parallel_rank", "data_parallel_start_rank"])
def test_a_rank_of_another_node_without_headless_gets_the_correct_flags(given: str) -> None:
    parallel = ParallelConfig(**{given: 1})  # type: ignore[arg-type]
    nodes = NodesConfig(data_parallel_address="10.0.0.1")
    with pytest.raises(BadNode, match=r"add --headless .* --coordinator 10\.0\.0\.1:7550"):
        joining(ServeConfig(nodes=nodes, parallel=parallel), LOCAL)
