"""A suspect runs alone, so that a crash identifies it and affects no other request."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.shared.messages import JsonObjectGrammar, RequestOutput

MakeRig = Callable[..., Any]
STEPS = 3


def add_suspect(rig: Any, id: int, length: int = 5, **arguments: Any) -> RequestOutput | None:
    message = rig.describe(id, list(range(500, 500 + length)), **arguments)
    rig.tokens[id] = []
    answer: RequestOutput | None = rig.scheduler.add(
        msgspec.structs.replace(message, exclusive_steps=STEPS)
    )
    return answer


def rows_of(rig: Any, plan: Any) -> set[int]:
    """Return the ids of the requests that a plan computes."""
    entry = next(each for each in rig.scheduler._in_flight if each.plan is plan)
    return {request.id for request in entry.requests}


def run_noting_rows(rig: Any, depth: int) -> list[tuple[int, set[int]]]:
    """Run to completion; return the exclusive request and the rows' requests of each plan."""
    noted: list[tuple[int, set[int]]] = []
    for _ in range(500):
        if not rig.scheduler.has_work:
            return noted
        plan = rig.schedule()
        noted.append((rig.scheduler.exclusive_request, rows_of(rig, plan)))
        if not plan.slots or len(rig.in_flight) >= depth:
            rig.update()
            while rig.in_flight and not rig.in_flight[0][0].slots:
                rig.update()
    raise AssertionError("still work")


@pytest.mark.parametrize(("depth", "speculative_ngram"), [(1, 0), (2, 0), (1, 3)])
def test_nothing_is_computed_together_with_a_suspect(
    make_rig: MakeRig, depth: int, speculative_ngram: int
) -> None:
    rig = make_rig(speculative_ngram=speculative_ngram, max_num_batched_tokens=8)
    rig.add(1, list(range(20)), max_tokens=30)
    rig.add(2, list(range(7)), max_tokens=30)
    for _ in range(4):
        rig.step()
    add_suspect(rig, 9, length=20, max_tokens=12)
    noted = run_noting_rows(rig, depth)
    alone = [rows for who, rows in noted if who == 9]
    assert alone[0] == set(), "it is announced before it runs"
    assert all(rows <= {9} for rows in alone)
    assert sum(bool(rows) for rows in alone) >= 3 + STEPS - 1, "three chunks, then draws"
    together = [rows for who, rows in noted if who == 0]
    assert any(9 in rows and rows & {1, 2} for rows in together), "an ordinary request after"
    rig.assert_complete()
    rig.assert_idle()


def test_a_suspect_is_announced_only_when_the_steps_of_others_have_landed(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.add(1, [1, 2, 3], max_tokens=30)
    rig.schedule()
    rig.schedule()
    add_suspect(rig, 9)
    rig.schedule()
    assert rig.scheduler.exclusive_request == 0
    for _ in range(3):
        rig.update()
    plan = rig.schedule()
    assert rig.scheduler.exclusive_request == 9
    assert not plan.slots
    assert rows_of(rig, rig.schedule()) == {9}
    while rig.in_flight:
        rig.update()
    rig.run()
    rig.assert_complete()


def test_suspects_of_several_front_ends_alternate(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, [1, 2, 3], max_tokens=40)
    rig.step()
    for id in (7, 8):
        add_suspect(rig, id, front_end=id - 7, max_tokens=10)
    noted = run_noting_rows(rig, 1)
    order = [who for who, _ in noted if who]
    assert order == sorted(order)
    assert set(order) == {7, 8}
    assert all(rows <= {who} for who, rows in noted if who)
    rig.assert_complete()


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_kv_blocks": 12}])
def test_suspect_preempts_last_request_without_free_slot(
    make_rig: MakeRig, limits: dict[str, int]
) -> None:
    rig = make_rig(**limits, max_model_len=48)
    rig.add(1, list(range(16)), max_tokens=20)
    rig.add(2, list(range(16)), max_tokens=20)
    rig.step()
    add_suspect(rig, 9, length=20, max_tokens=28)
    noted = run_noting_rows(rig, 1)
    assert all(rows <= {9} for who, rows in noted if who)
    assert rig.scheduler.counters.preemptions > 0
    rig.assert_complete()
    rig.assert_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_suspect_is_not_preempted_while_isolated(make_rig: MakeRig, policy: str) -> None:
    rig = make_rig(max_num_seqs=1, scheduling_policy=policy)
    add_suspect(rig, 9, max_tokens=8, priority=5)
    rig.step()
    rig.step()
    rig.add(1, [1, 2], max_tokens=3, priority=-5)
    noted = run_noting_rows(rig, 1)
    assert all(rows <= {9} for who, rows in noted if who)
    rig.assert_complete()
    rig.assert_idle()


def test_others_continue_after_suspect_is_aborted(make_rig: MakeRig) -> None:
    for steps in range(5):
        rig = make_rig()
        rig.add(1, [1, 2, 3], max_tokens=10)
        add_suspect(rig, 9, max_tokens=20)
        for _ in range(steps):
            rig.step()
        rig.scheduler.abort([9])
        assert rig.scheduler.exclusive_request == 0
        del rig.requests[9], rig.tokens[9]
        rig.run()
        rig.assert_complete()
        rig.assert_idle()


class _Grammar:
    def __init__(self) -> None:
        self.settled = False
        self.error: str | None = None
        self.no_room = False


class _Grammars:
    def __init__(self) -> None:
        self.asked: list[_Grammar] = []

    def on_settled(self) -> None: ...

    def request(self, spec: object, tenant: int) -> _Grammar:
        self.asked.append(_Grammar())
        return self.asked[-1]

    def assign(self, slot: int, grammar: _Grammar) -> None: ...

    def release(self, slot: int) -> None: ...


@pytest.mark.parametrize("error", [None, "it cannot be compiled"])
def test_grammar_of_suspect_is_compiled_during_isolation(
    make_rig: MakeRig, error: str | None
) -> None:
    rig, grammars = make_rig(), _Grammars()
    rig.scheduler._requests.grammars = grammars
    rig.add(1, [1, 2, 3], max_tokens=20)
    rig.step()
    add_suspect(rig, 9, grammar=JsonObjectGrammar())
    assert not grammars.asked
    assert not rig.step().slots
    assert len(grammars.asked) == 1
    assert rig.scheduler.exclusive_request == 9
    assert not rig.scheduler.needs_plan, "others wait, and the loop has to sleep"
    grammars.asked[0].settled, grammars.asked[0].error = True, error
    answers = rig.scheduler.queue_compiled()
    if error is None:
        assert rows_of(rig, rig.schedule()) == {9}
        rig.update()
        return
    assert [answer.error for answer in answers[0]] == [error]
    assert rig.scheduler.exclusive_request == 0
    assert rows_of(rig, rig.schedule()) == {1}
