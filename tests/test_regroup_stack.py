"""Members of a lockstep group that die, leave and come: the others go on with all the experts."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import ADMIN_KEY, are_replaced, call, complete, incarnations
from tests.support.load import Load, settle
from tests.support.lockstep import FLAGS, infos, kill, topologies, watched, wave_when_paused
from tests.support.metrics import total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

PROMPTS = [f"{name}, what" for name in ("ROMEO", "JULIET", "HENRY")]
TOKENS = 24
MOVING = ("--enable-eplb", "--num-redundant-experts", "2", "--eplb-step-interval", "3")
"""Experts move in most steps, so that engines die while they do."""


@pytest.mark.parametrize(
    ("dead", "regroup", "more"),
    [(1, "wait", MOVING), (0, "shrink", ("--async-scheduling",))],
    ids=["wait, moving", "shrink, overlapped"],
)
def test_requests_survive_the_death_of_a_member(
    dead: int, regroup: str, more: tuple[str, ...]
) -> None:
    flags = ("--data-parallel-size", "3", "--regroup", regroup, *more)
    with RunningStack(*FLAGS, *flags) as stack:
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            told = list(clients.map(lambda i: complete(stack.url, PROMPTS[i], TOKENS, i), range(3)))
        if more == MOVING:
            until(lambda: total(stack.url, "expert_layers_moved_total") > 0, "experts have moved")
        one_dies(stack, dead, told, topologies_later=1 if regroup == "wait" else 2)


def one_dies(stack: RunningStack, dead: int, told: list[str], topologies_later: int) -> None:
    """Kill an engine under load; `told` is what engines answer that nobody disturbs."""
    wave = wave_when_paused(stack.url)
    (before,) = topologies(stack.url)
    processes = incarnations(stack.url, range(3))
    generated = total(stack.url, "engine_generation_tokens_total")

    def tokens() -> float:
        return total(stack.url, "engine_generation_tokens_total") - generated

    with watched(stack, 250), ThreadPoolExecutor(len(PROMPTS)) as clients:
        sent = [clients.submit(complete, stack.url, PROMPTS[i], TOKENS, i) for i in range(3)]
        until(lambda: tokens() > TOKENS, "all are in the middle of it")
        died = kill(stack, f"engine {dead}")
        assert [each.result(200) for each in sent] == told
        print(f"the last answer {time.monotonic() - died:.2f} s later")
        until(partial(are_replaced, stack.url, processes, [dead]), "it is back")
        until(lambda: is_one_group(stack.url, 3, before + topologies_later), "in one group again")
        sent = [clients.submit(complete, stack.url, PROMPTS[i], TOKENS, i) for i in range(3)]
        assert [each.result(200) for each in sent] == told
        wave_when_paused(stack.url, after=wave)


def is_one_group(url: str, size: int, first: int) -> bool:
    """Whether so many engines say that they are in the same group, that one or a later one."""
    told = [int(info["topology"]) for info in infos(url).values()]
    return len(told) == size and len(set(told)) == 1 and told[0] >= first


SIMULATED = (
    "--enable-expert-parallel", "--executor", "simulated", "--simulated-step-us", "10000",
    "--admin-key", ADMIN_KEY, "--data-parallel-size", "2",
)  # fmt: skip


def test_a_group_grows_shrinks_and_is_replaced_under_load() -> None:
    with (
        RunningStack(*SIMULATED) as stack,
        watched(stack, 250),
        Load(stack.url, 8).running() as load,
    ):
        for size in (3, 1, 2):
            call(f"{stack.url}/admin/scale", {"data_parallel_size": size})
            assert settle(stack.url, size)["error"] is None
            until(lambda: len(topologies(stack.url)) == 1, "one group")
        old = incarnations(stack.url, range(2))
        call(f"{stack.url}/admin/restart", {})
        settle(stack.url, 2)
        until(lambda: are_replaced(stack.url, old, range(2)), "both are other processes")
        load.goes_on()
    load.check()


def test_hung_member_delays_others_only_until_timeout() -> None:
    flags = (*SIMULATED, "--engine-timeout", "2")
    with (
        RunningStack(*flags) as stack,
        watched(stack, 250),
        ThreadPoolExecutor(3) as clients,
    ):
        told = [complete(stack.url, f"No. {i}", 30, seed=i) for i in range(3)]
        wave_when_paused(stack.url)
        stopped = stack.processes()["engine 1"]
        sent = [clients.submit(complete, stack.url, f"No. {i}", 30, seed=i) for i in range(3)]
        stopped.send_signal(signal.SIGSTOP)
        assert [each.result(200) for each in sent] == told
        stopped.send_signal(signal.SIGCONT)
        until(lambda: len(infos(stack.url)) == 2, "it takes part again")
        until(lambda: len(topologies(stack.url)) == 1, "in one group")
        assert [complete(stack.url, f"No. {i}", 30, 1, seed=i) for i in range(3)] == told
