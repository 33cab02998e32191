"""The CPUs available to this process, and CPU binding."""

import contextlib
import logging
import os
from pathlib import Path

from engine.shared.cpu.lists import BadCpuList, CpuList, list_text, read_list
from engine.shared.cpu.plan import Core, Topology

logger = logging.getLogger(__name__)

_ROOT = Path("/")


def read_topology(root: Path = _ROOT) -> Topology | None:
    """Return the CPUs that this process can use; None where binding is not supported.

    In a container, or under a program such as taskset, these are not all CPUs of the machine.

    Args:
        root: directory that contains `sys` and `proc`.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    usable = os.sched_getaffinity(0)
    cores = sorted({_core(cpu, usable, root) for cpu in usable})
    nodes = []
    directory = root / "sys/devices/system/node"
    for number in _list_in(directory / "online"):
        cpus = set(_list_in(directory / f"node{number}/cpulist"))
        if own := tuple(core for core in cores if core[0] in cpus):
            nodes.append(own)
    if sum(map(len, nodes)) != len(cores):  # kernel without NUMA, or /sys partly hidden
        nodes = [tuple(cores)]
    return Topology(tuple(nodes), cpu_quota(root))


def usable_cores(root: Path = _ROOT) -> int:
    """Return the number of physical cores that this process can use."""
    usable = os.sched_getaffinity(0)
    return len({_core(cpu, usable, root) for cpu in usable})


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPU quota of this process's control groups, in CPUs; None: no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup/cpu", _quota_of_version_1
        else:
            continue
        # Inside a container its own group appears as the root, whatever its path outside.
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # the group is outside the visible hierarchy
            parts = []
        above = (base.joinpath(*parts[:length]) for length in range(len(parts) + 1))
        found += [quota for each in above if (quota := read(each)) is not None]
    return min(found, default=None)


def bind_process(cpus: CpuList) -> bool:
    """Bind all threads of this process to these CPUs; return whether it worked.

    Call before loading libraries, which count CPUs, and before allocating memory, which is then
    local to these CPUs. An empty list does nothing.
    """
    if not cpus:
        return False
    try:
        os.sched_setaffinity(0, cpus)
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has exited
                os.sched_setaffinity(int(thread.name), cpus)
    except OSError as error:  # removed from the container's CPU set since they were chosen
        logger.warning("cannot be bound to CPUs %s: %s", list_text(cpus), error)
        return False
    return True


def _core(cpu: int, usable: set[int], root: Path) -> Core:
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    siblings = _list_in(path) or (cpu,)
    return tuple(each for each in siblings if each in usable) or (cpu,)


def _list_in(path: Path) -> CpuList:
    try:
        return read_list(path.read_text().strip())
    except (OSError, BadCpuList):  # missing, or empty for a node that has only memory
        return ()


def _quota(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_of_version_1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        return None if quota < 0 else quota / period
    except (OSError, ValueError, ZeroDivisionError):
        return None
