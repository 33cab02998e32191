"""Actors, nodes and supervisors that die: streams go on, ranks come back, nothing is left."""

import asyncio
import signal
import time

import psutil
import pytest

from benchmarks.failover import Answer, Progress, Request, make_requests, run
from benchmarks.running_stack import RunningStack
from tests.ray.cluster import hosts, scale, serve
from tests.ray.nodes import Nodes, engines, is_empty
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.ray

SIMULATED = ("--executor", "simulated")


class Strikes:
    """Kills an actor and then a node, each when a share of what is streamed has come."""

    def __init__(self, nodes: Nodes, expected_pieces: int) -> None:
        self._nodes = nodes
        self._expected = expected_pieces

    async def run(self, progress: Progress) -> None:
        await self._until(progress, 0.1)
        actor = next(a for a in self._nodes.actors() if a["Name"].startswith("swell engine 1 "))
        psutil.Process(actor["Pid"]).kill()
        progress.disturbances.append((time.monotonic(), "actor"))
        await self._until(progress, 0.45)
        self._nodes.lose("127.0.0.3")
        progress.disturbances.append((time.monotonic(), "node"))

    async def _until(self, progress: Progress, share: float) -> None:
        deadline = time.monotonic() + PATIENCE
        while progress.pieces < share * self._expected and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def state(stack: RunningStack, rank: int) -> str:
    phase: str = scale(stack)["engines"][str(rank)]
    return phase


def test_streams_survive_an_actor_and_a_node_and_ranks_come_back() -> None:
    flags = ("--data-parallel-size", "3", "--ray-dp-pack-strategy", "fill", "--batch-invariant")
    # One node more than there are ranks.
    with Nodes(1, 1, 1, 1) as four, serve(four, *flags) as stack:
        todo = [ask for ask in make_requests(32, 90) if "stream" in ask.kind]
        assert len(todo) == 64
        calm_progress = Progress()
        calm = asyncio.run(run(stack.url, todo, None, calm_progress))
        progress = Progress()
        strikes = Strikes(four, calm_progress.pieces)
        stormy = asyncio.run(run(stack.url, todo, strikes.run, progress))
        # 64 streams are complete and byte for byte the same.
        assert [what for _, what in progress.disturbances] == ["actor", "node"]
        check_same(todo, calm, stormy)
        # The rank of the lost node is back on the spare one.
        until(lambda: hosts(stack).get("2") == "127.0.0.4", "it is placed again")
        until(lambda: state(stack, 2) == "ready", "it serves again")
        # Without room it waits and says for what.
        until(lambda: state(stack, 1) == "ready", "all serve")
        four.lose("127.0.0.4")
        until(lambda: state(stack, 2).startswith("waiting for 1 CPU"), "it waits")
        assert "127.0.0.2 0 of 1 CPU" in state(stack, 2)
        # A node that joins takes it.
        joined = four.add(1)
        until(lambda: state(stack, 2) == "ready", "it serves again")
        assert hosts(stack)["2"] == joined.node_ip_address
        stack.stop()
        until(lambda: is_empty(four), "nothing is left")


def check_same(todo: list[Request], calm: list[Answer], stormy: list[Answer]) -> None:
    for ask, before, after in zip(todo, calm, stormy, strict=True):
        assert (before.error, after.error) == (None, None)
        assert before.output == after.output, ask.body


@pytest.mark.parametrize("how", ["engine", "worker process of the actor"])
def test_rank_is_restarted_after_death_of_any_part(nodes: Nodes, how: str) -> None:
    flags = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    with serve(nodes, *SIMULATED, *flags) as stack:
        before = {each.pid for each in engines()}
        victim = engines()[0] if how == "engine" else engines()[0].parent()
        assert victim is not None
        victim.kill()
        until(lambda: len({each.pid for each in engines()} - before) == 1, "another engine")
        until(lambda: all(state(stack, rank) == "ready" for rank in (0, 1)), "both serve")
        until(lambda: len(nodes.groups()) == len(nodes.actors()) == 2, "nothing else is left")
    until(lambda: is_empty(nodes), "nothing is left")


def test_engines_exit_with_stalled_supervisor_and_return_with_it(
    nodes: Nodes,
) -> None:
    """Ray takes it for alive, as it does one on the other side of a broken network."""
    with serve(nodes, *SIMULATED, "--data-parallel-size-local", "2") as stack:
        before = engines()
        stack.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: not any(runs(each) for each in before), "engines end by themselves")
        finally:
            stack.process.send_signal(signal.SIGCONT)
        until(lambda: len(engines()) == 2, "other engines")
        until(lambda: all(state(stack, rank) == "ready" for rank in (0, 1)), "both serve")
    until(lambda: is_empty(nodes), "nothing is left")


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_killed_supervisor_leaves_nothing_and_can_be_restarted(nodes: Nodes) -> None:
    flags = (*SIMULATED, "--data-parallel-size-local", "2")
    with serve(nodes, *flags) as stack:
        until(lambda: len(nodes.groups()) == len(engines()) == 2, "both engines have started")
        stack.kill()
        until(lambda: is_empty(nodes), "actors, groups and engines have gone")
        with serve(nodes, *flags) as successor:
            assert len(hosts(successor)) == 2
    until(lambda: is_empty(nodes), "nothing is left")
