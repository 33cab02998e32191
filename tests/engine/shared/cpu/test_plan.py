"""CPU placement of a node's processes, on simulated machines."""

import random

import pytest

from engine.shared.cpu.lists import CpuList
from engine.shared.cpu.plan import BadCpuBind, BindRequest, CpuPlan, Topology, make_plan


def machine(nodes: int, cores: int, threads: int = 1, quota: float | None = None) -> Topology:
    """Return a machine that numbers first threads first, as most with x86 processors do."""
    total = nodes * cores
    return Topology(
        tuple(
            tuple(
                tuple(node * cores + core + total * thread for thread in range(threads))
                for core in range(cores)
            )
            for node in range(nodes)
        ),
        quota,
    )


def request(bind: str, engines: int, **other: int | bool | None) -> BindRequest:
    fields = {"bind": bind, "engines": engines, **other}
    return BindRequest(**fields)  # type: ignore[arg-type]  # by name, as the struct checks


def span(first: int, last: int) -> CpuList:
    return tuple(range(first, last + 1))


def test_two_engines_get_a_numa_node_each_minus_front_end_cores() -> None:
    plan = make_plan(request("auto", 2, others=3), machine(2, 32))
    assert plan.engines == ((span(2, 31),), (span(34, 63),))
    assert plan.others == (0, 1, 32, 33)
    assert [plan.of_engine(number) for number in range(3)] == ["2-31", "34-63", "none"]


def test_cores_are_assigned_with_all_their_threads() -> None:
    plan = make_plan(request("auto", 2), machine(2, 4, threads=2))
    assert plan.engines == (((0, 1, 2, 3, 8, 9, 10, 11),), ((4, 5, 6, 7, 12, 13, 14, 15),))


def test_processes_of_one_engine_share_a_node_if_possible() -> None:
    plan = make_plan(request("auto", 2, processes=2), machine(2, 8))
    assert plan.engines == ((span(0, 3), span(4, 7)), (span(8, 11), span(12, 15)))
    alone = make_plan(request("auto", 1, processes=2), machine(2, 8))
    assert alone.engines == ((span(0, 7), span(8, 15)),)


def test_engine_gets_neighbouring_nodes_if_nodes_outnumber_engines() -> None:
    plan = make_plan(request("auto", 2), machine(4, 8))
    assert plan.engines == ((span(0, 15),), (span(16, 31),))


@pytest.mark.parametrize(
    ("made", "topology", "reason"),
    [
        (request("auto", 2), machine(1, 64), "one NUMA node"),
        (request("auto", 1), machine(2, 32), "one process may use all"),
        (request("auto", 0), machine(2, 32), "one process may use all"),
        (request("auto", 3), machine(2, 32), "3 processes cannot share 2 NUMA nodes evenly"),
        (request("auto", 2, others=3), machine(2, 4), "left over"),
        (request("auto", 40), machine(2, 16), "left over"),
        (request("auto", 2), machine(2, 32, quota=48.0), "quota"),
        (request("auto", 2, on_cpu=False), machine(2, 32), "no model"),
        (request("auto", 2, threads=40), machine(2, 32), "--threads"),
        (request("none", 2), machine(2, 32), "--cpu-bind none"),
        (request("auto", 2), None, "cannot be bound"),
        # A container whose CPUs are nearly all on one of two nodes.
        (request("auto", 2), Topology((((0,), (1,), (2,)), ((8,),))), "left over"),
    ],
)
def test_auto_does_not_bind_if_that_could_be_slower(
    made: BindRequest, topology: Topology | None, reason: str
) -> None:
    plan = make_plan(made, topology)
    assert (plan.engines, plan.others) == ((), ())
    assert reason in plan.reason
    assert plan.of_engine(0) == "none"


def test_quota_of_all_cpus_is_no_limit() -> None:
    assert make_plan(request("auto", 2), machine(2, 32, quota=64.0)).engines


def test_lists_are_used_unchanged_and_front_ends_get_the_rest() -> None:
    plan = make_plan(request("1-3|5-7", 2, others=2), machine(2, 4))
    assert plan == CpuPlan((((1, 2, 3),), ((5, 6, 7),)), (0, 4))
    crowded = make_plan(request("1-3|5-7", 2, others=3), machine(2, 4))
    assert crowded.others == (), "they would have to share CPUs: they use any"


def test_a_list_for_an_engine_is_divided_among_its_processes_by_whole_cores() -> None:
    plan = make_plan(request("0-7", 1, processes=2), machine(1, 4, threads=2))
    assert plan.engines == (((0, 1, 4, 5), (2, 3, 6, 7)),)
    uneven = make_plan(request("0-4", 1, processes=3), machine(1, 8))
    assert uneven.engines == (((0, 1), (2, 3), (4,)),)


def test_lists_for_processes_are_grouped_by_engine() -> None:
    plan = make_plan(request("0|1|2|3", 2, processes=2), machine(1, 4))
    assert plan.engines == (((0,), (1,)), ((2,), (3,)))


def test_extra_lists_are_for_engines_added_by_scaling() -> None:
    plan = make_plan(request("0|1|2", 2), machine(1, 4))
    assert [plan.of_engine(number) for number in range(4)] == ["0", "1", "2", "none"]


@pytest.mark.parametrize(
    ("made", "topology", "complaint"),
    [
        (request("0-3|4-8", 2), machine(1, 8), r"CPU 8 is not among .* here: 0-7"),
        (request("0-3", 2), machine(1, 8), r"for each engine of this node \(2\), .* not 1"),
        (request("0|1|2", 2, processes=2), machine(1, 8), r"or for each of their processes \(4\)"),
        (request("0|1|2|3|4", 2, processes=2), machine(1, 8), r"\(4\), .* not 5"),
        (request("0,4", 1, processes=2), machine(1, 4, threads=2), "1 core for 2 processes"),
        (request("0-3|4-5", 2, threads=3), machine(1, 8), "4-5 is shorter than the 3 threads"),
        (request("0-3|4-7", 2), None, "needs Linux"),
    ],
)
def test_mismatched_lists_are_refused_by_flag_name(
    made: BindRequest, topology: Topology | None, complaint: str
) -> None:
    with pytest.raises(BadCpuBind, match=f"--cpu-bind .*{complaint}"):
        make_plan(made, topology)


def any_topology(draw: random.Random) -> Topology:
    """Return a machine, maybe with unequal nodes and CPUs that a container has not."""
    whole = machine(
        draw.choice([1, 2, 2, 4, 8]),
        draw.choice([1, 2, 4, 8, 9, 16, 28]),
        draw.choice([1, 1, 2]),
    )
    share = draw.choice([1.0, 1.0, 1.0, 0.9, 0.5])
    nodes = []
    for node in whole.nodes:
        cores = [tuple(cpu for cpu in core if draw.random() < share) for core in node]
        if left := tuple(core for core in cores if core):
            nodes.append(left)
    quota = draw.choice([None, None, None, 3.5, 1000.0])
    return Topology(tuple(nodes) or (((0,),),), quota)


def check_auto(plan: CpuPlan, made: BindRequest, topology: Topology) -> None:
    cores = [set(core) for node in topology.nodes for core in node]
    flat = [cpus for engine in plan.engines for cpus in engine]
    assert [len(engine) for engine in plan.engines] == [made.processes] * made.engines
    whole = [[core for core in cores if core.issubset(cpus)] for cpus in map(set, flat)]
    sizes = set(map(len, whole))
    assert len(sizes) == 1, "the same number of whole cores for each"
    size = sizes.pop()
    assert 8 * size * len(flat) >= 7 * len(cores), "next to nothing is left over"
    assert sum(map(len, flat)) == sum(
        len(core) for core in cores if any(set(core) <= set(cpus) for cpus in flat)
    ), "no part of a core"
    for cpus in flat:
        touched = [
            node for node in topology.nodes if {c for core in node for c in core} & set(cpus)
        ]
        assert len(touched) == 1 or len(flat) < len(topology.nodes)
    assert topology.quota is None or topology.quota >= len(topology.cpus)
    assert len(plan.others) >= made.others
    assert made.threads is None or made.threads // made.processes <= min(map(len, flat))


def test_no_cpu_is_assigned_twice_on_random_machines() -> None:
    draw = random.Random(20)
    bound = 0
    for _ in range(5000):
        topology = any_topology(draw)
        made = request(
            "auto",
            draw.choice([0, 1, 2, 2, 3, 4, 8]),
            processes=draw.choice([1, 1, 1, 2, 4]),
            others=draw.choice([0, 1, 2, 3, 5, 9]),
            threads=draw.choice([None, None, None, 1, 8, 40]),
            on_cpu=draw.random() < 0.95,
        )
        plan = make_plan(made, topology)
        given = [cpu for engine in plan.engines for cpus in engine for cpu in cpus]
        assert len(set(given + list(plan.others))) == len(given) + len(plan.others)
        assert set(given).union(plan.others) <= set(topology.cpus)
        assert bool(plan.engines) != bool(plan.reason)
        if plan.engines:
            bound += 1
            check_auto(plan, made, topology)
        else:
            assert plan.others == ()
    assert bound > 200, "it was seen to bind"


def test_lists_are_used_unchanged_or_refused_on_random_machines() -> None:
    draw = random.Random(21)
    kept = 0
    for _ in range(5000):
        topology = any_topology(draw)
        numbers = draw.sample(range(max(topology.cpus) + 2), min(12, len(topology.cpus)))
        count = draw.randint(1, min(5, len(numbers)))
        lists = [sorted(numbers[part::count]) for part in range(count)]
        made = request(
            "|".join(",".join(map(str, cpus)) for cpus in lists),
            draw.choice([1, 2, 3, 4]),
            processes=draw.choice([1, 1, 2]),
            others=draw.choice([0, 1, 4]),
        )
        try:
            plan = make_plan(made, topology)
        except BadCpuBind:
            continue
        kept += 1
        given = [cpu for engine in plan.engines for cpus in engine for cpu in cpus]
        assert sorted(given) == sorted(cpu for cpus in lists for cpu in cpus)
        assert len(plan.engines) >= made.engines
        assert all(len(engine) == made.processes and all(engine) for engine in plan.engines)
        assert not set(given) & set(plan.others)
        assert not plan.others or len(plan.others) >= made.others
    assert kept > 500
