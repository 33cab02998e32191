"""Reading a machine from a fake /sys, and binding this process temporarily."""

import os
from pathlib import Path

import pytest

from engine.shared.cpu.machine import bind_process, cpu_quota, read_topology, usable_cores
from engine.shared.cpu.plan import Topology

SIBLINGS = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2,6", 6: "2,6", 3: "3,7", 7: "3,7"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with two NUMA nodes of two cores each, and a third node that is memory only."""
    for cpu, siblings in SIBLINGS.items():
        directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(directory / "thread_siblings_list", siblings)
    nodes = tmp_path / "sys/devices/system/node"
    write(nodes / "online", "0-2")
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7", "")):
        write(nodes / f"node{node}/cpulist", cpus)
    return tmp_path


def usable(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cpus))


def test_nodes_and_cores_are_read(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    usable(monkeypatch, *range(8))
    assert read_topology(root) == Topology((((0, 4), (1, 5)), ((2, 6), (3, 7))))
    assert usable_cores(root) == 4


def test_a_container_sees_its_own_cpus_only(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    usable(monkeypatch, 1, 2, 5)
    assert read_topology(root) == Topology((((1, 5),), ((2,),)))
    assert usable_cores(root) == 2
    usable(monkeypatch, 6, 7)
    assert read_topology(root) == Topology((((6,), (7,)),))


def test_machine_without_sysfs_has_one_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usable(monkeypatch, 0, 1)
    assert read_topology(tmp_path) == Topology((((0,), (1,)),))
    write(tmp_path / "sys/devices/system/node/online", "0")
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0")
    assert read_topology(tmp_path) == Topology((((0,), (1,)),)), "a node that lacks one is none"


def test_a_system_without_binding_has_no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_setaffinity")
    assert read_topology() is None


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"cpu.max": "800000 100000", "a/cpu.max": "400000 100000"}, 4.0),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "400000 100000"}, 2.0),
        ("0::/../x", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/", {"cpu.max": "a b"}, None),
        ("0::/", {"cpu.max": "1 0"}, None),
        (
            "3:cpu,cpuacct:/docker/1\n0::/",
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, None),
    ],
)
def test_smallest_quota_of_all_control_groups_applies(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
) -> None:
    write(tmp_path / "proc/self/cgroup", groups)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert cpu_quota(tmp_path) == quota


def test_no_limit_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


def test_topology_of_this_machine_has_allowed_cpus() -> None:
    topology = read_topology()
    assert topology is not None
    assert set(topology.cpus) == os.sched_getaffinity(0)


def test_process_that_cannot_be_bound_continues(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    assert not bind_process(())
    assert not bind_process((8191,))
    assert "cannot be bound to CPUs 8191" in caplog.text
    assert os.sched_getaffinity(0) == before
