"""The CPUs assigned to the supervisor's processes."""

import asyncio
from pathlib import Path

import msgspec
import psutil
import pytest

from coordinator.config import CoordinatorConfig, CoordinatorLaunch
from engine.shared.config import (
    ClusterConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
)
from engine.shared.cpu.machine import read_topology
from engine.shared.cpu.plan import Topology
from engine.shared.messages import ChildReady, ChildStatus
from engine.shared.node_directory import NodeDirectory
from server.config import ServeConfig
from server.config.fleet import SupervisorConfig
from server.fleet.backend import CannotServe, ProcessBackend
from server.fleet.child import Child, Program
from server.fleet.node_resources import of_standalone_engine, plan_cpus
from server.fleet.ray.resources import engine_config
from server.fleet.roles import coordinator_role, front_end_roles
from tests.support.waiting import PATIENCE

TWO_NODES = Topology((tuple((cpu,) for cpu in range(32)), tuple((cpu,) for cpu in range(32, 64))))


def two_nodes() -> Topology:
    return TWO_NODES


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All CPUs of a machine with two NUMA nodes, 32 cores each."""
    monkeypatch.setattr("server.fleet.node_resources.read_topology", two_nodes)


def settings(bind: str = "auto", engines: int = 2) -> ServeConfig:
    return ServeConfig(
        executor=ExecutorConfig(cpu_bind=bind),
        parallel=ParallelConfig(data_parallel_size=engines),
        supervisor=SupervisorConfig(api_server_count=2),
        model=ModelConfig(device="cpu"),
    )


@pytest.mark.usefixtures("large_machine")
def test_engines_get_their_own_cpus_and_front_ends_the_rest(tmp_path: Path) -> None:
    backend = ProcessBackend(settings(), tmp_path)
    config = backend.joined.config
    launches = [backend.engine_role(config, place, numbered=True).launch(1) for place in range(3)]
    binds = [launch.config.executor.cpu_bind for launch in launches]
    assert binds == ["2-31", "34-63", "none"], "an engine that scaling adds runs anywhere"
    others = backend.cpus_of_others
    assert others == (0, 1, 32, 33)
    assert coordinator_role(config, is_new=True, cpus=others).launch(1).cpus == others
    with NodeDirectory(str(tmp_path / "node")) as node:
        roles = front_end_roles(config, node, 0, numbered=True, scalable=True, cpus=others)
    assert [role.launch(1)["cpus"] for role in roles] == [others, others]


@pytest.mark.usefixtures("large_machine")
def test_mismatched_cpu_lists_prevent_supervisor_start(tmp_path: Path) -> None:
    with pytest.raises(CannotServe, match="--cpu-bind 0-3: give a list for each engine"):
        ProcessBackend(settings("0-3"), tmp_path)
    with pytest.raises(CannotServe, match=r"--cpu-bind 0-3\|64: CPU 64 is not among"):
        ProcessBackend(settings("0-3|64"), tmp_path)


@pytest.mark.usefixtures("large_machine")
@pytest.mark.parametrize(
    ("number", "bind", "own"),
    [(0, "0-3|4-7", "0-3"), (1, "0-3|4-7", "4-7"), (0, "auto", "0-31"), (0, "none", "none")],
)
def test_standalone_engine_gets_its_own_cpus(number: int, bind: str, own: str) -> None:
    parallel = ParallelConfig(data_parallel_size_local=2, data_parallel_rank_local=number)
    config = EngineConfig(
        parallel=parallel,
        executor=ExecutorConfig(cpu_bind=bind),
        model=ModelConfig(device="cpu"),
    )
    assert of_standalone_engine(config).executor.cpu_bind == own


@pytest.mark.usefixtures("large_machine")
@pytest.mark.parametrize(
    ("device", "executor", "devices", "is_bound"),
    [
        ("auto", "model", 0, True),
        ("auto", "model", 2, False),
        ("cpu", "model", 2, True),
        ("cuda", "model", 2, False),
        ("cpu", "simulated", 0, False),
    ],
)
def test_auto_binds_only_models_on_cpus(
    device: str, executor: str, devices: int, is_bound: bool
) -> None:
    config = msgspec.convert(
        {"model": {"device": device}, "executor": {"executor": executor}}, EngineConfig
    )
    plan = plan_cpus(config, devices=devices)
    assert bool(plan.engines) == is_bound


def test_topology_is_not_read_without_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Topology:
        raise AssertionError

    monkeypatch.setattr("server.fleet.node_resources.read_topology", fail)
    config = EngineConfig(executor=ExecutorConfig(cpu_bind="none"))
    assert plan_cpus(config, devices=0).reason == "--cpu-bind none"


def test_engines_on_ray_are_not_bound() -> None:
    assert (
        engine_config(EngineConfig(), gpus=False, max_engines_per_node=1).executor.cpu_bind
        == "none"
    )


@pytest.mark.slow  # starts a process
def test_a_process_that_is_given_cpus_runs_only_on_them(tmp_path: Path) -> None:
    topology = read_topology()
    assert topology is not None
    asyncio.run(run_a_coordinator_on(topology.cpus[-1], tmp_path))


async def run_a_coordinator_on(cpu: int, directory: Path) -> None:
    """Start a coordinator like a supervisor and check its address."""
    cluster = ClusterConfig(coordinator=f"ipc://{directory}/coordinator")
    launch = CoordinatorLaunch(CoordinatorConfig(cluster=cluster), cpus=(cpu,))
    said: asyncio.Queue[ChildStatus] = asyncio.Queue()
    program = Program(
        name="coordinator",
        module="coordinator",
        launch=launch,
        on_status=said.put_nowait,
        on_line=lambda _: None,
    )
    child = await Child.start(program)
    try:
        assert isinstance(await asyncio.wait_for(said.get(), PATIENCE), ChildReady)
        assert psutil.Process(child.pid).cpu_affinity() == [cpu]
    finally:
        child.kill()
        await child.wait()
