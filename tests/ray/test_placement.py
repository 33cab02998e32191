"""Engines placed on the nodes of a real Ray cluster, or refused with the reason."""

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.failover import Progress, make_requests, run
from benchmarks.running_stack import RunningStack
from tests.ray.cluster import hosts, scale, serve, uses
from tests.ray.nodes import NAMESPACE, Nodes, engines, is_empty
from tests.support.commands import run_swell
from tests.support.http import complete, ready_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.ray

SIMULATED = ("--executor", "simulated")
SECRET = "a secret that nobody else may see"


@pytest.fixture(autouse=True)
def leaves_nothing(nodes: Nodes) -> Iterator[None]:
    yield
    until(lambda: is_empty(nodes), "nothing is left in the cluster")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--data-parallel-size-local", "2"), [2, 2]),
        (("--ray-dp-pack-strategy", "fill", "--data-parallel-size", "3"), [2, 1]),
        (("--ray-dp-pack-strategy", "fill", "--data-parallel-size-local", "1"), [1, 2, 1]),
        (("--ray-dp-pack-strategy", "span", "--data-parallel-size", "5"), [2, 2, 1]),
        (("--data-parallel-size", "2", "--tensor-parallel-size", "2",
          "--data-parallel-size-local", "1"), [1, 1]),
    ],
    ids=["strict", "fill", "fill with one on the head", "span", "strict with two processes"],
)  # fmt: skip
def test_ranks_are_placed_according_to_strategy(
    nodes: Nodes, flags: tuple[str, ...], expected: list[int]
) -> None:
    size = () if "--data-parallel-size" in flags else ("--data-parallel-size", "4")
    with serve(nodes, *SIMULATED, *size, *flags) as stack:
        found = hosts(stack)
        order = [nodes.head_address, "127.0.0.2", "127.0.0.3"]
        assert [Counter(found.values())[each] for each in order if each in found.values()] == (
            expected
        )
        assert [found[rank] for rank in sorted(found)] == sorted(found.values(), key=order.index)
        groups = nodes.groups()
        assert {group["name"] for group in groups} == {f"swell engine {rank}" for rank in found}
        assert all(group["strategy"] == "STRICT_PACK" for group in groups)
        until(lambda: len(nodes.actors()) == sum(expected), "each has an actor")


def test_three_nodes_answer_64_streams_of_the_bundled_model(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key that must not be seen, and variables of which only some are for engines."""
    key = tmp_path / "cluster.key"
    key.write_text(SECRET)
    monkeypatch.setenv("HF_OF_THIS_TEST", "for engines")
    monkeypatch.setenv("OTHER_OF_THIS_TEST", "not for engines")
    flags = ("--data-parallel-size", "3", "--data-parallel-size-local", "1")
    with serve(nodes, *flags, "--cluster-key-file", str(key)) as stack:
        assert len(set(hosts(stack).values())) == 3
        todo = [ask for ask in make_requests(32, 24) if "stream" in ask.kind]
        assert len(todo) == 64
        answers = asyncio.run(run(stack.url, todo, None, Progress()))
        assert [answer.error for answer in answers if answer.error] == []
        told = "\n".join(stack.lines)
        assert all(f"[engine {rank}]" in told or f"engine {rank} ready" in told for rank in (0, 1))
        for engine in engines():
            variables = engine.environ()
            assert variables["HF_OF_THIS_TEST"] == "for engines"
            assert "OTHER_OF_THIS_TEST" not in variables
            assert SECRET not in str(variables)
        assert SECRET not in told
        assert SECRET not in f"{nodes.groups()}{nodes.actors()}"
        assert_unseen(SECRET, Path(nodes.cluster.head_node.get_session_dir_path()))


def test_placement_groups_that_exist_are_used_and_left(nodes: Nodes) -> None:
    group = nodes.make_group("theirs", "127.0.0.3", {"CPU": 1})
    try:
        flags = ("--ray-placement-groups", "theirs", "--ray-namespace", NAMESPACE)
        with serve(nodes, *SIMULATED, *flags, "--ray-dp-pack-strategy", "fill") as stack:
            assert hosts(stack) == {"0": "127.0.0.3", "1": nodes.head_address}
            assert {each["name"] for each in nodes.groups()} == {"theirs", "swell engine 1"}
        until(lambda: not nodes.actors(), "the actors have gone")
        assert [each["name"] for each in nodes.groups()] == ["theirs"]
        address = ("--ray-address", nodes.address)
        told = refused(*SIMULATED, *flags, *address, "--threads", "2")
        assert "the bundles of theirs have 1 CPU, and a rank needs 2 CPU" in told
        assert "there is no theirs in Ray's namespace" in refused(*SIMULATED, *flags[:2], *address)
    finally:
        nodes.remove_group(group)


def test_placement_groups_of_one_unit_bundles_take_ranks_of_several_processes(
    nodes: Nodes,
) -> None:
    flags = ("--ray-placement-groups", "units", "--ray-namespace", NAMESPACE,
             "--tensor-parallel-size", "2", "--data-parallel-size", "1")  # fmt: skip
    units: tuple[dict[str, float], ...] = ({"CPU": 1}, {"CPU": 1})
    group = nodes.make_group("units", "127.0.0.3", *units, strategy="PACK")
    try:
        told = refused(*SIMULATED, *flags, "--ray-address", nodes.address)
        assert "make it with strategy STRICT_PACK" in told
    finally:
        nodes.remove_group(group)
    group = nodes.make_group("units", "127.0.0.3", *units)
    try:
        with serve(nodes, *SIMULATED, *flags) as stack:
            assert hosts(stack) == {"0": "127.0.0.3"}
            assert complete(stack.url, "Act", 4)
    finally:
        nodes.remove_group(group)


def test_the_gpus_of_all_bundles_of_a_group_are_found() -> None:
    """Ray counts GPUs that it is told of; no device is touched."""
    script = (
        "import asyncio, ray\n"
        "from server.fleet.ray.cluster import RayCluster\n"
        "ray.init(address='local', num_cpus=4, num_gpus=4, include_dashboard=False,\n"
        "         object_store_memory=80 << 20, namespace='n')\n"
        "cluster = RayCluster.__new__(RayCluster)\n"
        "taken = ray.util.placement_group([{'GPU': 1}])\n"
        "assert taken.wait(30)\n"
        "units = [{'GPU': 1, 'CPU': 1}, {'GPU': 1}, {'CPU': 1}]\n"
        "group = ray.util.placement_group(units, strategy='STRICT_PACK', name='g')\n"
        "assert group.wait(30)\n"
        "found = cluster.existing('g', {'CPU': 2.0, 'GPU': 2.0})\n"
        "assert found.bundle == {'CPU': 1.0, 'GPU': 1.0}, found\n"
        "devices = asyncio.run(cluster.devices(found)).split(',')\n"
        "assert len(devices) == len(set(devices)) == 2, devices\n"
        "print('found', devices)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "found" in done.stdout, done.stderr


def test_added_engine_with_strict_packing_goes_to_free_node(
    nodes: Nodes,
) -> None:
    with serve(nodes, *SIMULATED, "--data-parallel-size", "2") as stack:
        assert set(hosts(stack).values()) == {nodes.head_address}
        scale(stack, 3)
        until(lambda: ready_ranks(stack.url) == {0, 1, 2}, "the third is on another node")
        scale(stack, 7)
        waits = "engine .: waiting for 1 CPU: free are"
        until(lambda: re.search(waits, "\n".join(stack.lines)), "a wait for room is logged")
        scale(stack, 3)
        until(lambda: not scale(stack)["busy"], "the wait has an end")


def test_api_servers_elsewhere_join_and_balance_over_all_engines(
    nodes: Nodes, tmp_path: Path
) -> None:
    key = tmp_path / "cluster.key"
    key.write_text(SECRET)
    flags = ("--cluster-key-file", str(key))
    with serve(nodes, *SIMULATED, *flags, "--data-parallel-size-local", "1") as stack:
        told = re.search(r"listening on tcp://(\S+)", "\n".join(stack.lines))
        assert told is not None
        join = ("--coordinator", told[1], *flags, "--api-server-count", "2")
        with RunningStack(*join, command="api-server") as front:
            until(lambda: ready_ranks(front.url) == {0, 1}, "both engines are seen")
            until(lambda: uses(front.url) == {"0", "1"}, "both are used")
            status = scale(stack, 1)
            until(lambda: ready_ranks(front.url) == {0}, "the supervisor decides alone")
            assert not status["nodes"]


def assert_unseen(secret: str, session: Path) -> None:
    """Nothing that Ray has written in its session's directory has the secret."""
    files = [path for path in session.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 10
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def refused(*flags: str) -> str:
    """Return why `swell serve` does not start."""
    done = run_swell("serve", "--port", "0", "--data-parallel-backend", "ray", *flags)
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_too_few_resources_are_refused_with_needed_and_free(nodes: Nodes) -> None:
    flags = (*SIMULATED, "--ray-address", nodes.address, "--data-parallel-size", "4")
    told = refused(*flags, "--threads", "2", "--ray-dp-pack-strategy", "fill")
    assert "room for 3 of 4 ranks. Each needs 2 CPU" in told
    assert f"{nodes.head_address} 2 of 2 CPU; 127.0.0.2 2 of 2 CPU; 127.0.0.3 2 of 2 CPU" in told
    assert "--data-parallel-size-local" in refused(*flags)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--ray-address", "127.0.0.1:9"), "no Ray cluster answers at 127.0.0.1:9"),
        (("--ray-address", "ray://127.0.0.1:9"), "ray://127.0.0.1:9 is the address for Ray's"),
        (("--coordinator", "127.0.0.1:7550"), "leave out --headless and --coordinator"),
        (("--data-parallel-lb", "hybrid"), "add --api-server-placement every-node"),
        (("--data-parallel-lb", "external"), "leave out --data-parallel-lb external"),
        (("--data-parallel-start-rank", "2"), "leave out --data-parallel-rank"),
        (("--cpu-bind", "0|1"), "--cpu-bind with lists of CPUs is for engines of this node"),
    ],
)
def test_impossible_placements_are_refused_with_advice(flags: tuple[str, ...], reason: str) -> None:
    assert reason in refused(*flags)


def test_a_node_with_another_version_is_refused_with_both(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import engine.shared.version\nengine.shared.version.SWELL_VERSION = '9.8.7'\n"
    )
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", path)
        with Nodes(1) as other:
            patched.undo()
            node = other.head_address
            told = refused(*SIMULATED, "--ray-address", other.address, "--data-parallel-size", "1")
    assert f"node {node} has other versions: swell 9.8.7 there" in told
    assert "Install the same" in told


def test_a_node_without_the_models_files_is_named(nodes: Nodes) -> None:
    told = refused("/no/such/model", "--ray-address", nodes.address)
    assert "/no/such/model" in told


def test_own_cluster_is_started_and_ends_with_killed_supervisor() -> None:
    with RunningStack(
        *SIMULATED, "--data-parallel-backend", "ray", "--ray-address", "local",
        "--data-parallel-size", "1",
    ) as stack:  # fmt: skip
        everything = psutil.Process(stack.process.pid).children(recursive=True)
        assert any("raylet" in " ".join(each.cmdline()) for each in everything)
        everything += engines()
        stack.kill()
        until(lambda: not any(alive(each) for each in everything), "all has ended")


def alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; Ray's agents, which look for their cluster longer, aside."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not any(
            agent in " ".join(process.cmdline()) for agent in ("DashboardAgent", "RuntimeEnvAgent")
        )
    except psutil.NoSuchProcess:
        return False
