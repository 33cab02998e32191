"""What admission policies gain on a lockstep group whose steps only take virtual time."""

from dataclasses import replace

import pytest

from benchmarks.simulate import LOADS, Group, Load
from engine.shared.config import SchedulerConfig

pytestmark = pytest.mark.slow

PUB = replace(LOADS["pub"], count=192, concurrency=64, max_num_seqs=16)


def run(load: Load, policy: str) -> Group:
    return Group(load, SchedulerConfig(admission_policy=policy), seed=1).run()


def times(result: Group) -> list[tuple[int, int, int, int]]:
    return [(each.rank, each.arrived, each.first, each.last) for each in result.records]


@pytest.fixture(scope="module")
def published() -> dict[str, Group]:
    return {policy: run(PUB, policy) for policy in ("none", "balance", "level")}


def test_level_gains_more_than_balance_under_calibrated_load(
    published: dict[str, Group],
) -> None:
    none, balance, level = published.values()
    assert balance.rate > 1.05 * none.rate
    assert level.rate > 1.12 * balance.rate
    assert level.ttft < balance.ttft
    assert level.tpot < 0.80 * none.tpot


def test_no_policy_holds_prefills_too_long_or_without_reason(published: dict[str, Group]) -> None:
    for result in published.values():
        assert result.longest_hold < 16 * PUB.ranks
        assert result.held_without_decodes == 0
        assert all(record.finished for record in result.records)
        assert len(result.records) == PUB.count


def test_balance_changes_nothing_while_all_ranks_have_free_slots() -> None:
    load = replace(PUB, count=64, max_num_seqs=17)
    assert times(run(load, "none")) == times(run(load, "balance"))


def test_a_group_with_traffic_on_one_rank_runs_dummy_batches_and_is_not_held() -> None:
    none, level = (run(replace(LOADS["lone"], count=6), name) for name in ("none", "level"))
    assert times(none) == times(level)
    assert level.longest_hold == 0
    assert level.dummy_steps / level.steps == pytest.approx(0.75)
