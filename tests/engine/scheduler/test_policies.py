"""Admission policies as functions of tables: no scheduler, no clock."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.admission import (
    UNLIMITED,
    AdmissionPolicy,
    AdmitAll,
    Grant,
    PolicyFailed,
    RankState,
)
from engine.scheduler.policies import Balance, Cadence, Level, build_admission_policy
from engine.shared.config import ADMISSION_POLICIES, SchedulerConfig
from engine.shared.plugins import BadPlugin
from tests.support.plugins import offer

STEP_BUDGET = 4096


def rank(
    decodes: int = 8,
    ready: int = 0,
    requests: int | None = None,
    *,
    passed_over: int = 0,
    last_step_us: int = 0,
    last_prefill_tokens: int = 0,
) -> RankState:
    """A rank with some decodes and `ready` prefill tokens of `requests` waiting requests."""
    waiting = (ready > 0) if requests is None else requests
    return RankState(
        running=decodes,
        waiting=waiting,
        queued_prefill_tokens=ready,
        free_kv_blocks=100,
        decodes=decodes,
        ready_prefill_tokens=ready,
        ready_prefills=waiting,
        passed_over=passed_over,
        last_step_us=last_step_us,
        last_prefill_tokens=last_prefill_tokens,
    )


IDLE = rank(decodes=0)


def level(*, wait_weight: int = 4, hold_per_rank: int = 16) -> Level:
    return Level(step_budget=STEP_BUDGET, wait_weight=wait_weight, hold_per_rank=hold_per_rank)


def steps_until_granted(policy: AdmissionPolicy, table: Sequence[RankState]) -> tuple[int, Grant]:
    """Present the same table until prefill can run; return the number of held steps."""
    for step in range(10_000):
        grant = policy.decide(step, table)
        if grant.token_cap != 0:
            return step, grant
    raise AssertionError("held for ever")


# -- which policy --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lockstep_size", "expected"),
    [
        (None, 1, AdmitAll),
        (None, 2, Level),
        ("none", 4, AdmitAll),
        ("balance", 4, Balance),
        ("cadence", 1, Cadence),
        ("level", 1, Level),
    ],
)
def test_the_default_depends_on_whether_engines_step_together(
    name: Any, lockstep_size: int, expected: type
) -> None:
    config = SchedulerConfig(admission_policy=name)
    assert type(build_admission_policy(config, lockstep_size)) is expected


@pytest.mark.parametrize("name", ADMISSION_POLICIES)
def test_every_choice_of_the_setting_is_built_without_a_plugin(name: str) -> None:
    build_admission_policy(SchedulerConfig(admission_policy=name), lockstep_size=2)


def test_settings_reach_the_policy() -> None:
    config = SchedulerConfig(
        admission_policy="level", level_hold_per_rank=3, level_wait_weight=1,
        max_num_batched_tokens=STEP_BUDGET,
    )  # fmt: skip
    policy = build_admission_policy(config, 2)
    assert steps_until_granted(policy, [rank(900, 4000, 1), rank(900)])[0] == 3 * 2 - 1


# -- balance -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "admits"), [((4, 4), False), ((4, 0), False), ((3, 3), True), ((0, 0), True)]
)
def test_balance_admits_only_while_no_rank_is_full(running: tuple[int, int], admits: bool) -> None:
    grant = Balance(4).decide(0, [rank(count, 100) for count in running])
    assert grant.admit_new == admits
    assert grant.run_partials
    assert grant.token_cap == -1


# -- cadence -------------------------------------------------------------------------------------


def test_cadence_prefills_on_every_nth_step() -> None:
    policy = Cadence(3)
    granted = [policy.decide(step, [rank(8, 100)]).token_cap != 0 for step in range(7)]
    assert granted == [True, False, False, True, False, False, True]


def test_cadence_never_holds_a_rank_without_decodes() -> None:
    policy = Cadence(3)
    assert all(policy.decide(step, [rank(0, 100)]) == UNLIMITED for step in range(7))


def test_cadence_is_off_while_prefill_is_saturated() -> None:
    policy = Cadence(4)
    left = [0, 2, 1, 0, 0, 0]
    caps = [policy.decide(i, [rank(8, 100, passed_over=left[i])]).token_cap for i in range(6)]
    assert caps == [-1, -1, -1, 0, -1, 0]


def test_requests_waiting_after_held_step_do_not_count_as_saturation() -> None:
    policy = Cadence(4)
    caps = [policy.decide(i, [rank(8, 100, passed_over=int(i > 1))]).token_cap for i in range(4)]
    assert caps == [-1, 0, 0, 0]


# -- level ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        [rank(8, 3500)] * 4,
        [rank(8, 3500), IDLE, IDLE, IDLE],
        [rank(8, 100), rank(50, 100)],
    ],
)
def test_equal_amounts_never_wait(table: list[RankState]) -> None:
    grant = level().decide(0, table)
    assert grant.token_cap >= table[0].ready_prefill_tokens or grant.token_cap == -1


def test_misaligned_prefill_waits_until_waiting_costs_as_much_as_stall() -> None:
    # 4 decodes, each token beyond the mean costs 1/128 of a step: 4 / 128 * (1000 - 250) = 23.4
    # decode steps; one request that waits costs 4 a step.
    table = [rank(1, 1000), rank(1), rank(1), rank(1)]
    assert steps_until_granted(level(), table) == (5, Grant(token_cap=1000))
    assert steps_until_granted(level(wait_weight=8), table)[0] == 2


def test_cap_is_highest_level_worth_waiting_for() -> None:
    table = [rank(2, 4000), rank(2, 2000), rank(2, 2000), rank(2, 2000)]
    assert level().decide(0, table).token_cap == 2000
    assert level(wait_weight=40).decide(0, table).token_cap == 4000


def test_small_prefill_on_all_ranks_is_held() -> None:
    table = [rank(8, 2000), rank(8, 10)]
    assert level().decide(0, table).token_cap == 0


def test_grant_resets_the_waiting_cost() -> None:
    policy = level()
    table = [rank(1, 1000), rank(1), rank(1), rank(1)]
    first, _ = steps_until_granted(policy, table)
    assert steps_until_granted(policy, table)[0] == first


def with_costs(decode_us: int, prefill_us: int) -> Level:
    """A policy that has seen a decode step and one with 1000 more prefill tokens."""
    policy = level()
    duration = decode_us + 1000 * prefill_us
    policy.decide(0, [rank(4)] * 2)
    policy.decide(1, [rank(4, last_step_us=decode_us)] * 2)
    policy.decide(2, [rank(4, last_step_us=duration, last_prefill_tokens=1000), rank(4)])
    return policy


def test_expensive_prefill_waits_longer_than_cheap_prefill() -> None:
    table = [rank(4, 2000), rank(4)]
    cheap = steps_until_granted(with_costs(20_000, 10), table)[0]
    dear = steps_until_granted(with_costs(20_000, 40), table)[0]
    # 8 decodes, 1000 tokens beyond the mean, at 1/2000 and 1/500 of a step: 4 and 16.
    assert (cheap, dear) == (0, 3)


# -- what holds for any traffic ------------------------------------------------------------------

tables = st.integers(1, 6).flatmap(
    lambda ranks: st.lists(
        st.lists(
            st.builds(
                rank,
                decodes=st.integers(0, 64),
                ready=st.one_of(st.just(0), st.integers(1, STEP_BUDGET)),
                last_step_us=st.integers(0, 2_000_000),
                last_prefill_tokens=st.integers(0, STEP_BUDGET),
            ),
            min_size=ranks,
            max_size=ranks,
        ),
        min_size=1,
        max_size=150,
    )
)


@pytest.mark.slow
@given(tables)
@settings(max_examples=150)
def test_level_is_bounded_and_equal_on_all_ranks(sequence: list[list[RankState]]) -> None:
    ranks = [level(hold_per_rank=4) for _ in sequence[0]]
    in_a_row = 0
    for step, table in enumerate(sequence):
        grants = [policy.decide(step, tuple(table)) for policy in ranks]
        assert all(grant == grants[0] for grant in grants)
        cap = grants[0].token_cap
        ready = [state.ready_prefill_tokens for state in table]
        assert cap in {-1, 0, *ready}
        assert grants[0].admit_new
        assert grants[0].run_partials
        held = cap == 0 and max(ready) > 0
        in_a_row = in_a_row + 1 if held else 0
        assert in_a_row < 4 * len(table)
        if held:
            assert any(state.decodes for state in table)
            assert sum(1 for state in table if state.running or state.waiting) > 1


# -- what a rank says of itself ------------------------------------------------------------------


def test_ready_prefill_is_limited_by_slots_blocks_and_budget(
    make_rig: Callable[..., Any],
) -> None:
    rig = make_rig(max_num_seqs=3, max_num_batched_tokens=10, block_size=4, num_kv_blocks=64)
    rig.add(1, range(4))
    rig.step()
    assert rig.scheduler.rank_state().decodes == 1
    rig.add(2, range(100, 106))
    rig.add(3, range(200, 206))
    rig.add(4, range(300, 306))
    state = rig.scheduler.rank_state(last_step_us=7, last_prefill_tokens=4)
    assert (state.running, state.waiting, state.decodes) == (1, 3, 1)
    assert (state.ready_prefill_tokens, state.ready_prefills) == (9, 2)  # 10 less one decode
    assert (state.last_step_us, state.last_prefill_tokens) == (7, 4)
    rig.step()
    state = rig.scheduler.rank_state()
    assert (state.ready_prefill_tokens, state.ready_prefills) == (3, 1)  # no slot for the last
    assert state.passed_over == 1


def test_cached_prompt_tokens_are_not_ready_prefill(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(block_size=4)
    rig.add(1, range(13))
    rig.run()
    rig.add(2, range(13))
    assert rig.scheduler.rank_state().ready_prefill_tokens == 1


def test_requests_that_do_not_fit_cache_are_not_ready(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(block_size=4, num_kv_blocks=8)
    rig.add(1, range(20), max_tokens=8)
    rig.step()
    rig.add(2, range(100, 120))
    assert rig.scheduler.rank_state().ready_prefill_tokens == 0


def test_plan_computes_at_most_ready_prefill(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(max_num_seqs=4, max_num_batched_tokens=16)
    for id in range(1, 7):
        rig.add(id, range(10 * id, 10 * id + 3 + id))
    while rig.scheduler.has_work:
        ready = rig.scheduler.rank_state().ready_prefill_tokens
        plan = rig.schedule()
        decodes = sum(plan.starts[i] > 0 and c == 1 for i, c in enumerate(plan.counts))
        assert plan.num_tokens - decodes <= ready
        rig.update()


class Tidal:
    """A plugin's policy: no prefill in odd steps."""

    exchanges = False

    def __init__(self, config: SchedulerConfig, lockstep_size: int) -> None:
        self.config, self.lockstep_size = config, lockstep_size

    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        if step > 9:
            raise RuntimeError("the tide is out")
        return Grant(token_cap=0 if step % 2 else self.config.max_num_seqs * self.lockstep_size)


class Undecided(Tidal):
    def decide(self, step: int, table: Sequence[RankState]) -> Grant:
        return None  # type: ignore[return-value]


def test_policy_can_be_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(
        tmp_path, "swell.admission_policies",
        tidal=f"{__name__}:Tidal", undecided=f"{__name__}:Undecided",
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    config = SchedulerConfig(admission_policy="tidal")
    policy = build_admission_policy(config, 4)
    assert not policy.exchanges
    cap = 4 * config.max_num_seqs
    assert [policy.decide(step, [rank()]).token_cap for step in range(3)] == [cap, 0, cap]
    with pytest.raises(PolicyFailed, match=r"--admission-policy tidal .*the tide is out"):
        policy.decide(10, [rank()])
    with pytest.raises(BadPlugin, match=r"--admission-policy undecided: .*TypeError"):
        build_admission_policy(SchedulerConfig(admission_policy="undecided"), 1)
