import pytest

from engine.scheduler.admission import UNLIMITED, AdmitAll, Grant, StepBudget


def test_decodes_and_prefills_share_the_step_budget() -> None:
    budget = StepBudget(3)
    assert budget.try_decode()
    assert budget.try_continue(5) == 2
    assert not budget.try_decode()
    assert budget.try_continue(1) == 0
    assert not budget.can_admit
    assert budget.try_admit(1) == 0


def test_cap_limits_sum_of_prefills_and_never_decodes() -> None:
    budget = StepBudget(100, Grant(token_cap=10))
    assert budget.try_continue(6) == 6
    assert budget.can_admit
    assert budget.try_admit(6) == 4
    assert not budget.can_admit
    assert all(budget.try_decode() for _ in range(90))
    assert not budget.try_decode()


@pytest.mark.parametrize(
    ("grant", "partial", "new"),
    [
        (Grant(token_cap=0), 0, 0),
        (Grant(admit_new=False), 5, 0),
        (Grant(run_partials=False), 0, 5),
        (UNLIMITED, 5, 5),
    ],
)
def test_grant_holds_only_what_it_names(grant: Grant, partial: int, new: int) -> None:
    assert StepBudget(100, grant).try_continue(5) == partial
    assert StepBudget(100, grant).try_admit(5) == new
    assert StepBudget(100, grant).can_admit == (new > 0)


def test_the_policy_none_grants_everything() -> None:
    assert AdmitAll().decide(7, ()) == UNLIMITED
