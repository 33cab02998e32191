"""More and fewer engines on a Ray cluster under load, and more than there is room for."""

from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.running_stack import RunningStack
from tests.ray.cluster import scale, serve
from tests.ray.nodes import Nodes, is_empty
from tests.support.load import Load
from tests.support.metrics import metric
from tests.support.waiting import until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def stack(nodes: Nodes) -> Iterator[RunningStack]:
    flags = ("--executor", "simulated", "--simulated-step-us", "3000")
    with serve(nodes, *flags, "--ray-dp-pack-strategy", "fill") as running:
        yield running
    until(lambda: is_empty(nodes), "nothing is left")


def settled(stack: RunningStack, size: int) -> bool:
    status = scale(stack)
    return not status["busy"] and list(status["engines"].values()) == ["ready"] * size


def has_groups(nodes: Nodes, count: int) -> bool:
    return len(nodes.groups()) == count


def test_scaling_under_load_fails_no_request(nodes: Nodes, stack: RunningStack) -> None:
    with Load(stack.url, 16).running() as load:
        for size in (4, 1, 2):
            scale(stack, size)
            until(partial(settled, stack, size), f"{size} engines serve")
            until(partial(has_groups, nodes, size), "placement groups follow")
            load.goes_on()
    load.check()


def test_engines_without_resources_wait_until_available_or_scaled_down(
    nodes: Nodes, stack: RunningStack
) -> None:
    def waiting() -> list[str]:
        phases = scale(stack)["engines"].values()
        return [phase for phase in phases if phase.startswith("waiting for 1 CPU: free are ")]

    scale(stack, 8)
    until(lambda: len(waiting()) == 2, "two of eight find no room on six")
    told = scale(stack)["waiting"]
    assert list(told.values()) == ["CPU", "CPU"]
    until(
        lambda: set(metric(stack.url, "engine_waiting_for_resources")) == set(told),
        "metrics show them",
    )
    pending = [group for group in nodes.groups() if group["state"] == "PENDING"]
    assert len(pending) == 2, "which is what an autoscaler looks at"
    node = nodes.add(1)
    until(lambda: node.node_ip_address in scale(stack)["hosts"].values(), "a new node takes one")
    scale(stack, 2)
    until(lambda: settled(stack, 2), "the wait has an end")
    until(lambda: has_groups(nodes, 2), "placement groups follow")
    nodes.lose(node.node_ip_address)
