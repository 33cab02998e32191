"""The priority policy: which requests start first, and which are preempted."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.scheduler.admission import Grant
from engine.scheduler.preemption import FreeCapacity, choose_victims
from tests.engine.scheduler.conftest import queued

MakeRig = Callable[..., Any]


@pytest.fixture
def rig(make_rig: MakeRig) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        return make_rig(scheduling_policy="priority", **settings)

    return make


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 1000 for i in range(length)]


def ended(rig: Any) -> list[int]:
    """Run to completion; return the requests in order of completion."""
    rig.run()
    rig.assert_complete()
    rig.assert_idle()
    return list(rig.last)


def started(plan: Any) -> list[int]:
    """Return the first prompt token of each sequence that starts."""
    return [start.token_ids[0] for start in plan.starting]


def test_lowest_priority_number_starts_first_then_arrival_order(rig: Any) -> None:
    rig = rig(max_num_seqs=1)
    for id, priority in enumerate([5, 0, 5, -3, 0]):
        rig.add(id, prompt(3, id), max_tokens=1, priority=priority)
    assert ended(rig) == [3, 1, 4, 0, 2]


def test_first_come_first_served_ignores_priorities(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=1)
    for id, priority in enumerate([5, 0, -3]):
        rig.add(id, prompt(3, id), max_tokens=1, priority=priority)
    assert ended(rig) == [0, 1, 2]


def test_full_engine_preempts_least_urgent_for_more_urgent_request(rig: Any) -> None:
    rig = rig(max_num_seqs=3)
    rig.add(1, prompt(3, 100), max_tokens=9, priority=1)
    rig.add(2, prompt(3, 200), max_tokens=9, priority=7)
    rig.add(3, prompt(3, 300), max_tokens=9, priority=7)
    rig.step()
    rig.add(4, prompt(3, 400), max_tokens=2, priority=2)
    assert started(rig.step()) == [400]
    assert rig.scheduler.counters.preemptions == 1
    assert len(rig.tokens[3]) == 1
    assert started(rig.step()) == []
    assert started(rig.step()) == [300]
    assert ended(rig)[0] == 4


@pytest.mark.parametrize("priority", [4, 9])
def test_no_preemption_for_equal_or_less_urgent_request(rig: Any, priority: int) -> None:
    rig = rig(max_num_seqs=2)
    rig.add(1, prompt(3), max_tokens=5, priority=4)
    rig.add(2, prompt(3, 100), max_tokens=5, priority=4)
    rig.step()
    rig.add(3, prompt(3, 200), max_tokens=1, priority=priority)
    assert ended(rig) == [1, 2, 3]
    assert rig.scheduler.counters.preemptions == 0


def test_blocks_are_taken_from_least_urgent_request(rig: Any) -> None:
    rig = rig(num_kv_blocks=12, enable_prefix_caching=False)
    rig.add(1, prompt(15), max_tokens=6, priority=0)
    rig.add(2, prompt(15, 100), max_tokens=6, priority=9)
    rig.add(3, prompt(15, 200), max_tokens=6, priority=5)
    assert started(rig.step()) == [0, 200, 100]
    rig.add(4, prompt(10, 300), max_tokens=2, priority=1)
    assert started(rig.step()) == [300]
    assert rig.scheduler.counters.preemptions == 1
    assert ended(rig) == [4, 1, 3, 2]


def test_decode_takes_its_block_from_least_urgent_request(rig: Any) -> None:
    rig = rig(num_kv_blocks=6, max_model_len=24, enable_prefix_caching=False)
    rig.add(1, prompt(11, 100), max_tokens=6, priority=8)
    rig.step()
    rig.add(2, prompt(11), max_tokens=6, priority=3)
    assert ended(rig) == [2, 1]
    assert rig.scheduler.counters.preemptions == 1


def test_urgent_request_that_would_still_not_fit_preempts_nothing(rig: Any) -> None:
    rig = rig(num_kv_blocks=8, enable_prefix_caching=False)
    rig.add(1, prompt(15), max_tokens=6, priority=0)
    rig.add(2, prompt(6, 100), max_tokens=2, priority=9)
    rig.step()
    rig.add(3, prompt(20, 200), max_tokens=1, priority=5)
    assert started(rig.step()) == []
    assert ended(rig) == [2, 1, 3]
    assert rig.scheduler.counters.preemptions == 0


def test_policy_that_admits_nothing_preempts_nothing(rig: Any) -> None:
    rig = rig(max_num_seqs=1)
    rig.add(1, prompt(3), max_tokens=5, priority=4)
    rig.step()
    rig.add(2, prompt(3, 100), max_tokens=1, priority=0)
    for grant in (Grant(admit_new=False), Grant(token_cap=0)):
        assert len(rig.step(grant).slots) == 1
    assert rig.scheduler.counters.preemptions == 0
    assert ended(rig) == [2, 1]


def test_urgent_prompt_precedes_rest_of_long_prompt(rig: Any) -> None:
    rig = rig(max_num_batched_tokens=8)
    rig.add(1, prompt(30), max_tokens=1, priority=5)
    rig.step()
    rig.add(2, prompt(6, 100), max_tokens=1, priority=0)
    plan = rig.step()
    assert plan.counts == [6, 2]
    assert ended(rig) == [2, 1]


def test_preemptions_match_requests_that_a_step_can_start(rig: Any) -> None:
    rig = rig(max_num_seqs=4, max_num_batched_tokens=16)
    for id in range(4):
        rig.add(id, prompt(3, id), max_tokens=20, priority=9)
    rig.step()
    for id in range(4, 8):
        rig.add(id, prompt(6, 100 * id), max_tokens=9, priority=1)
    assert started(rig.step()) == [400, 500, 600]
    assert sorted(ended(rig)[:4]) == [4, 5, 6, 7]


def test_victim_with_step_in_flight_keeps_its_result(rig: Any) -> None:
    rig = rig(max_num_seqs=1)
    rig.add(1, prompt(3), max_tokens=9, priority=4)
    rig.schedule()
    rig.schedule()
    rig.add(2, prompt(3, 100), max_tokens=1, priority=0)
    assert rig.schedule().slots == []
    rig.update()
    assert rig.scheduler.counters.preemptions == 1
    assert len(rig.tokens[1]) == 1
    rig.update()
    assert len(rig.tokens[1]) == 2
    assert started(rig.schedule()) == [100]
    rig.run(depth=2)
    rig.assert_complete()
    rig.assert_idle()


# -- by themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "needed", "victims"),
    [
        (FreeCapacity(slots=1, blocks=9, headroom=1, tokens=99), 4, []),
        (FreeCapacity(slots=0, blocks=9, headroom=1, tokens=99), 4, [3]),
        (FreeCapacity(slots=1, blocks=4, headroom=1, tokens=99), 4, [3]),
        (FreeCapacity(slots=1, blocks=0, headroom=0, tokens=99), 4, [3, 2]),
        (FreeCapacity(slots=0, blocks=0, headroom=1, tokens=99), 4, []),  # headroom is missing
        (FreeCapacity(slots=0, blocks=9, headroom=0, tokens=0), 1, []),
    ],
)
def test_fewest_possible_victims_are_chosen(
    room: FreeCapacity, needed: int, victims: list[int]
) -> None:
    running = [
        queued(id, priority=priority, blocks=blocks)
        for id, priority, blocks in ((1, 1, 5), (2, 6, 2), (3, 8, 2))
    ]
    chosen = choose_victims([queued(4, priority=5)], running, room, lambda _: needed)
    assert [victim.arrival for victim in chosen] == victims
