"""Plans which CPUs each engine of a node runs on (`--cpu-bind`). No I/O.

Memory is where the thread that first writes it runs, so a process that stays on one NUMA node has
its weights and KV cache there, and reads them at that node's full speed. This is what binding is
for, and why `auto` leaves a machine with one NUMA node alone: all its memory is equally near, and
a scheduler that may move threads gets around whatever else runs there.

`auto` takes nothing from anybody: it binds only where all processes get equal shares, next to no
core is left over but what the front ends need, and nobody else has a say in who gets the CPUs.
"""

import msgspec

from engine.shared.cpu.lists import CpuList, list_text, lists_text, read_lists

_LEAST_USE = 7 / 8
"""Share of the cores that engines have to get for `auto` to bind them."""

Core = CpuList
"""The CPUs of one core, its hardware threads, as far as they may be used."""


class BadCpuBind(ValueError):
    """`--cpu-bind` asks for what cannot be had; the message is for people."""


class Topology(msgspec.Struct, frozen=True):
    """The CPUs that may be used."""

    nodes: tuple[tuple[Core, ...], ...]
    """The cores of each NUMA node that has any, in order."""
    quota: float | None = None
    """How many CPUs' time may be used, if that is limited."""

    @property
    def cpus(self) -> CpuList:
        """All CPUs, in order."""
        return tuple(sorted(cpu for node in self.nodes for core in node for cpu in core))

    @property
    def num_cores(self) -> int:
        """How many cores there are."""
        return sum(map(len, self.nodes))


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed on a node."""

    bind: str
    """The setting: `auto`, `none` or lists of CPUs."""
    engines: int
    """How many engines the node runs from the start on."""
    processes: int = 1
    """How many processes compute each engine's model."""
    others: int = 0
    """How many front ends and coordinators run beside them."""
    threads: int | None = None
    """Compute threads of each engine, where that is set."""
    on_cpu: bool = True
    """Whether the engines compute a model on CPUs."""


class CpuPlan(msgspec.Struct, frozen=True):
    """Where the processes of a node run."""

    engines: tuple[tuple[CpuList, ...], ...] = ()
    """For each bound engine the CPUs of each of its processes, in the order of stages."""
    others: CpuList = ()
    """CPUs of front ends and the coordinator; empty: any."""
    reason: str = ""
    """Why no engine is bound, for people."""

    def of_engine(self, number: int) -> str:
        """Return the lists of a node's engine, as the setting would have them; else `none`.

        Engines that scaling adds beyond the plan run wherever there is room.
        """
        if number >= len(self.engines):
            return "none"
        return lists_text(self.engines[number])


def make_plan(wish: Wish, topology: Topology | None) -> CpuPlan:
    """Return where everything runs.

    Args:
        topology: what the machine has; None if that is unknown, or processes cannot be bound.

    Raises:
        BadCpuBind: lists that do not fit the machine or the engines.
    """
    if wish.bind == "none":
        return CpuPlan(reason="--cpu-bind none")
    if topology is None:
        if wish.bind != "auto":
            raise BadCpuBind("--cpu-bind with lists of CPUs needs Linux: use auto or none")
        return CpuPlan(reason="processes cannot be bound on this system")
    if wish.bind == "auto":
        found = _shares(wish, topology)
        if isinstance(found, str):
            return CpuPlan(reason=found)
        lists = [_cpus(cores) for cores in found]
    else:
        lists = _chosen(wish, topology)
    each = wish.processes
    engines = tuple(tuple(lists[at : at + each]) for at in range(0, len(lists), each))
    return CpuPlan(engines, _rest(wish, topology, lists))


def _shares(wish: Wish, topology: Topology) -> list[list[Core]] | str:
    count, nodes = wish.engines * wish.processes, topology.nodes
    is_even = count > 0 and (count % len(nodes) == 0 or len(nodes) % count == 0)
    obstacles = (
        (not wish.on_cpu, "no model is computed on CPUs"),
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
    together = max(1, len(nodes) // count)  # nodes of one process, which are near each other
    groups = [
        [core for node in nodes[at : at + together] for core in node]
        for at in range(0, len(nodes), together)
    ]
    in_group = count // len(groups)
    size = min(len(group) // in_group for group in groups)
    size = min(size, (topology.num_cores - wish.others) // count)
    if size < 1 or size * count < _LEAST_USE * topology.num_cores:
        return "more than an eighth of the cores would be left over"
    found = []
    for group in groups:
        used = group[len(group) - size * in_group :]  # Linux's own work is on the first ones
        found += [used[at : at + size] for at in range(0, len(used), size)]
    threads = (wish.threads or 0) // wish.processes
    if threads > min(len(_cpus(cores)) for cores in found):
        return "--threads is more than a process's share of the CPUs"
    return found


def _chosen(wish: Wish, topology: Topology) -> list[CpuList]:
    """Return the CPUs of each process as the setting's lists have them.

    Raises:
        BadCpuBind: they do not fit.
    """
    lists = list(read_lists(wish.bind))
    usable = set(topology.cpus)
    for cpus in lists:
        if missing := [cpu for cpu in cpus if cpu not in usable]:
            raise BadCpuBind(
                f"--cpu-bind {wish.bind}: CPU {missing[0]} is not among those that may be used "
                f"here: {list_text(topology.cpus)}"
            )
    processes = wish.processes
    if len(lists) == wish.engines and processes > 1:
        lists = [part for cpus in lists for part in _divided(cpus, wish, topology)]
    if len(lists) < wish.engines * processes or len(lists) % processes:
        of_processes = f", or for each of their processes ({wish.engines * processes})"
        raise BadCpuBind(
            f"--cpu-bind {wish.bind}: give a list for each engine of this node ({wish.engines})"
            f"{of_processes if processes > 1 else ''}, separated by |, not {len(lists)}"
        )
    threads = (wish.threads or 0) // processes
    shortest = min(lists, key=len)
    if threads > len(shortest):
        raise BadCpuBind(
            f"--cpu-bind {wish.bind}: the list {list_text(shortest)} is shorter than the {threads} "
            "threads of a process: lower --threads or give it more CPUs"
        )
    return lists


def _divided(cpus: CpuList, wish: Wish, topology: Topology) -> list[CpuList]:
    """Return an engine's CPUs divided among its processes, whole cores to each.

    Raises:
        BadCpuBind: it has more processes than cores.
    """
    wanted, parts = set(cpus), wish.processes
    cores = [
        own for node in topology.nodes for core in node if (own := tuple(wanted.intersection(core)))
    ]
    if len(cores) < parts:
        raise BadCpuBind(
            f"--cpu-bind {wish.bind}: {list_text(cpus)} has {len(cores)} "
            f"{'core' if len(cores) == 1 else 'cores'} for {parts} processes: give it more"
        )
    size, more = divmod(len(cores), parts)
    ends = [size * (part + 1) + min(part + 1, more) for part in range(parts)]
    return [_cpus(cores[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _rest(wish: Wish, topology: Topology, lists: list[CpuList]) -> CpuList:
    """Return the CPUs of front ends and the coordinator; empty if they had to share one."""
    taken = {cpu for cpus in lists for cpu in cpus}
    rest = tuple(cpu for cpu in topology.cpus if cpu not in taken)
    return rest if wish.others and len(rest) >= wish.others else ()


def _cpus(cores: list[Core]) -> CpuList:
    return tuple(sorted(cpu for core in cores for cpu in core))
