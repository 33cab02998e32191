"""Engines on several nodes of a Ray cluster that share the experts of a model."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.running_stack import RunningStack
from tests.ray.cluster import hosts, serve
from tests.ray.nodes import Nodes
from tests.support.http import complete
from tests.support.lockstep import FLAGS, topologies, wave_when_paused
from tests.support.metrics import metric

pytestmark = pytest.mark.ray

PROMPTS = ("To be", "Once more", "My lord", "What news", "Come", "Farewell")


def texts(stack: RunningStack) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        return list(clients.map(lambda prompt: complete(stack.url, prompt, 40), PROMPTS))


def test_lockstep_group_over_two_nodes_counts_waves_and_answers_like_one_engine(
    nodes: Nodes,
) -> None:
    plain = ("--data-parallel-size", "1", "--dtype", "float32", "--api-server-count", "1")
    with RunningStack(*plain, "--threads", "1") as alone:
        expected = texts(alone)
    flags = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    with serve(nodes, *FLAGS, *flags) as stack:
        assert len(set(hosts(stack).values())) == 2
        assert topologies(stack.url) != {0}
        for _ in range(2):
            before = wave_when_paused(stack.url)
            assert texts(stack) == expected
            wave_when_paused(stack.url, after=before)
        steps = metric(stack.url, "dummy_steps_total")
        assert len(steps) == 2
