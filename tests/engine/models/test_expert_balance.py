"""Expert placement from measured load: properties of pure functions, and the measurement."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.parallel.balance import (
    ExpertBalance,
    Placement,
    arrange,
    copies_in_group,
    first_placement,
    rank_loads,
)

CPU = torch.device("cpu")


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], Placement]:
    experts, size = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    copies = copies_in_group(experts, draw(st.integers(0, 16)), size)
    counts = st.one_of(st.integers(0, 1000), st.sampled_from([0, 1, 10**6]))
    tokens = draw(st.lists(counts, min_size=experts, max_size=experts))
    return tokens, first_placement(experts, copies, size)


def check(placement: Placement, like: Placement, experts: int) -> None:
    assert [len(held) for held in placement] == [len(held) for held in like]
    assert all(held == sorted(set(held)) for held in placement), "no rank has one twice"
    assert {expert for held in placement for expert in held} == set(range(experts))


@given(loads())
def test_any_load_gives_complete_placement_no_worse_than_before(
    load: tuple[list[int], Placement],
) -> None:
    tokens, before = load
    check(before, before, len(tokens))
    after = arrange(tokens, before)
    check(after, before, len(tokens))
    assert sum(rank_loads(tokens, after)) == pytest.approx(sum(tokens))
    assert max(rank_loads(tokens, after)) <= max(rank_loads(tokens, before))
    assert arrange(tokens, before) == after, "all ranks have to come to the same"


@given(loads(), st.lists(st.integers(0, 500), min_size=24, max_size=24))
def test_second_placement_change_starts_from_first(
    load: tuple[list[int], Placement], later: list[int]
) -> None:
    tokens, before = load
    once = arrange(tokens, before)
    twice = arrange(later[: len(tokens)], once)
    check(twice, before, len(tokens))


def test_heaviest_expert_is_copied_and_others_are_balanced() -> None:
    tokens = [90, 60, 10, 10, 10, 10, 5, 5]
    before = first_placement(8, 10, 2)
    assert before == [[0, 1, 2, 3, 4], [0, 1, 5, 6, 7]]
    assert rank_loads(tokens, first_placement(8, 8, 2)) == [170, 30]
    after = arrange(tokens, before)
    assert rank_loads(tokens, after) == [100, 100]
    assert all({0, 1} <= set(held) for held in after)


def test_small_gains_move_no_experts() -> None:
    before = first_placement(8, 8, 2)
    assert arrange([100, 100, 100, 100, 100, 100, 100, 101], before) is before
    after = arrange([50, 50, 0, 0, 1, 0, 0, 0], before)
    moved = sum(len(set(held) - set(had)) for held, had in zip(after, before, strict=True))
    assert moved == 2, "one expert each way"


def test_full_rank_swaps_experts() -> None:
    tokens = [0, 100, 10, 10, 10]
    before = [[0, 1, 2], [0, 3, 4]]
    check(arrange(tokens, before), before, 5)


def balance(**changes: int) -> ExpertBalance:
    made = ExpertBalance(2, 4, changes.get("redundant", 0), changes.get("interval", 2), CPU)
    made.reset(changes.get("size", 2))
    return made


def told(ranks: list[ExpertBalance]) -> None:
    rows = [each.row() for each in ranks]
    for each in ranks:
        each.update(rows)


def test_measured_load_changes_one_layer_per_step_on_all_ranks() -> None:
    ranks = [balance(redundant=2), balance(redundant=2)]
    for step in range(2):
        due = [each.is_due() for each in ranks]
        assert due == [step == 1] * 2
    for each in ranks:
        for layer in range(2):
            each.count(layer, torch.tensor([[0, 1], [0, 1], [0, 2]]))
    for layer in range(2):
        ranks[0].count_computed(layer, 10)
        ranks[1].count_computed(layer, 2)
    told(ranks)
    for each in ranks:
        assert each.imbalance == pytest.approx(10 / 6)
        before = each.placement(1)
        assert not each.is_due(), "it changes what it has found first"
        moved = each.next_layer()
        while moved is not None:
            moved = each.next_layer()
        check(each.placement(1), before, 4)
    assert ranks[0].placement(0) == ranks[1].placement(0)
    assert ranks[0].row() == [0] * 10, "counted from here on"


def test_new_group_starts_without_measured_load() -> None:
    one = balance(redundant=3, interval=1)
    one.count(0, torch.tensor([[3], [3]]))
    one.count_computed(0, 5)
    told([one, one])
    assert one.imbalance == 1.0
    one.reset(3)
    assert one.imbalance is None
    assert one.num_copies == 7
    assert one.next_layer() is None
    assert not any(one.row())
    one.reset(1)
    assert one.num_copies == 4, "one rank has no use for two of the same"
    assert not one.is_due(), "and nothing to balance"
