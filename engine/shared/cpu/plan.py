"""Plans which CPUs each engine of a node runs on (`--cpu-bind`). No I/O.

Memory is allocated on the NUMA node of the thread that first writes it, so a process that stays on
one node has local weights and KV cache, and reads them at full speed. That is the purpose of
binding, and why `auto` does nothing on a machine with one NUMA node: there all memory is equally
near, and an unbound process can be scheduled around other load.

`auto` is conservative: it binds only if all processes get equal shares, almost no core is left over
besides those for front ends, and no quota suggests that the CPUs are shared.
"""

import msgspec

from engine.shared.cpu.lists import CpuList, list_text, lists_text, read_lists

_LEAST_USE = 7 / 8
"""Minimum share of the cores that engines have to get for `auto` to bind them."""

Core = CpuList
"""The usable hardware threads of one core."""


class BadCpuBind(ValueError):
    """`--cpu-bind` cannot be satisfied; the message is user-facing."""


class Topology(msgspec.Struct, frozen=True):
    """The usable CPUs."""

    nodes: tuple[tuple[Core, ...], ...]
    """The cores of each NUMA node that has any, in order."""
    quota: float | None = None
    """CPU quota in CPUs; None: no limit."""

    @property
    def cpus(self) -> CpuList:
        """All CPUs, sorted."""
        return tuple(sorted(cpu for node in self.nodes for core in node for cpu in core))

    @property
    def num_cores(self) -> int:
        """Number of cores."""
        return sum(map(len, self.nodes))


class BindRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The processes to place on a node."""

    bind: str
    """The setting: `auto`, `none` or lists of CPUs."""
    engines: int
    """Number of engines that the node starts with."""
    processes: int = 1
    """Number of processes per engine."""
    others: int = 0
    """Number of front ends and coordinators on the node."""
    threads: int | None = None
    """Compute threads per engine, if configured."""
    on_cpu: bool = True
    """Whether the engines compute a model on CPUs."""


class CpuPlan(msgspec.Struct, frozen=True):
    """CPU placement of a node's processes."""

    engines: tuple[tuple[CpuList, ...], ...] = ()
    """CPUs of each process of each bound engine, in stage order."""
    others: CpuList = ()
    """CPUs of front ends and the coordinator; empty: any."""
    reason: str = ""
    """Why no engine is bound, for the log."""

    def of_engine(self, number: int) -> str:
        """Return an engine's lists in the setting's syntax; `none` if it is not bound.

        Engines that scaling adds beyond the plan are not bound.
        """
        if number >= len(self.engines):
            return "none"
        return lists_text(self.engines[number])


def make_plan(request: BindRequest, topology: Topology | None) -> CpuPlan:
    """Return the CPU placement of all processes.

    Args:
        topology: the machine's CPUs; None if unknown, or if binding is not supported.

    Raises:
        BadCpuBind: the configured lists do not fit the machine or the engines.
    """
    if request.bind == "none":
        return CpuPlan(reason="--cpu-bind none")
    if topology is None:
        if request.bind != "auto":
            raise BadCpuBind("--cpu-bind with lists of CPUs needs Linux: use auto or none")
        return CpuPlan(reason="processes cannot be bound on this system")
    if request.bind == "auto":
        found = _shares(request, topology)
        if isinstance(found, str):
            return CpuPlan(reason=found)
        lists = [_cpus(cores) for cores in found]
    else:
        lists = _chosen(request, topology)
    each = request.processes
    engines = tuple(tuple(lists[at : at + each]) for at in range(0, len(lists), each))
    return CpuPlan(engines, _rest(request, topology, lists))


def _shares(request: BindRequest, topology: Topology) -> list[list[Core]] | str:
    count, nodes = request.engines * request.processes, topology.nodes
    is_even = count > 0 and (count % len(nodes) == 0 or len(nodes) % count == 0)
    obstacles = (
        (not request.on_cpu, "no model is computed on CPUs"),
        (len(nodes) < 2, "there is one NUMA node"),
        (count < 2, "one process may use all NUMA nodes"),
        (
            topology.quota is not None and topology.quota < len(topology.cpus),
            "a quota limits the CPU time, so others use these CPUs too",
        ),
        (not is_even, f"{count} processes cannot share {len(nodes)} NUMA nodes evenly"),
    )
    if against := [reason for applies, reason in obstacles if applies]:
        return against[0]
    together = max(1, len(nodes) // count)  # adjacent nodes per process
    groups = [
        [core for node in nodes[at : at + together] for core in node]
        for at in range(0, len(nodes), together)
    ]
    in_group = count // len(groups)
    size = min(len(group) // in_group for group in groups)
    size = min(size, (topology.num_cores - request.others) // count)
    if size < 1 or size * count < _LEAST_USE * topology.num_cores:
        return "more than an eighth of the cores would be left over"
    found = []
    for group in groups:
        used = group[len(group) - size * in_group :]  # the kernel prefers the first cores
        found += [used[at : at + size] for at in range(0, len(used), size)]
    threads = (request.threads or 0) // request.processes
    if threads > min(len(_cpus(cores)) for cores in found):
        return "--threads is more than a process's share of the CPUs"
    return found


def _chosen(request: BindRequest, topology: Topology) -> list[CpuList]:
    """Return the configured CPUs of each process.

    Raises:
        BadCpuBind: the lists do not fit the machine or the engines.
    """
    lists = list(read_lists(request.bind))
    usable = set(topology.cpus)
    for cpus in lists:
        if missing := [cpu for cpu in cpus if cpu not in usable]:
            raise BadCpuBind(
                f"--cpu-bind {request.bind}: CPU {missing[0]} is not among those that may be used "
                f"here: {list_text(topology.cpus)}"
            )
    processes = request.processes
    if len(lists) == request.engines and processes > 1:
        lists = [part for cpus in lists for part in _divided(cpus, request, topology)]
    if len(lists) < request.engines * processes or len(lists) % processes:
        of_processes = f", or for each of their processes ({request.engines * processes})"
        raise BadCpuBind(
            f"--cpu-bind {request.bind}: give a list for each engine of this node "
            f"({request.engines}){of_processes if processes > 1 else ''}, separated by |, "
            f"not {len(lists)}"
        )
    threads = (request.threads or 0) // processes
    shortest = min(lists, key=len)
    if threads > len(shortest):
        raise BadCpuBind(
            f"--cpu-bind {request.bind}: the list {list_text(shortest)} is shorter than the "
            f"{threads} threads of a process: lower --threads or give it more CPUs"
        )
    return lists


def _divided(cpus: CpuList, request: BindRequest, topology: Topology) -> list[CpuList]:
    """Return an engine's CPUs divided among its processes, in whole cores.

    Raises:
        BadCpuBind: there are more processes than cores.
    """
    allowed, parts = set(cpus), request.processes
    cores = [
        own
        for node in topology.nodes
        for core in node
        if (own := tuple(allowed.intersection(core)))
    ]
    if len(cores) < parts:
        raise BadCpuBind(
            f"--cpu-bind {request.bind}: {list_text(cpus)} has {len(cores)} "
            f"{'core' if len(cores) == 1 else 'cores'} for {parts} processes: give it more"
        )
    size, more = divmod(len(cores), parts)
    ends = [size * (part + 1) + min(part + 1, more) for part in range(parts)]
    return [_cpus(cores[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _rest(request: BindRequest, topology: Topology, lists: list[CpuList]) -> CpuList:
    """Return the CPUs for front ends and the coordinator; empty if there is not one for each."""
    taken = {cpu for cpus in lists for cpu in cpus}
    rest = tuple(cpu for cpu in topology.cpus if cpu not in taken)
    return rest if request.others and len(rest) >= request.others else ()


def _cpus(cores: list[Core]) -> CpuList:
    return tuple(sorted(cpu for core in cores for cpu in core))
