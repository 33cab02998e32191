"""The engines in scope of a front end, by load-balancing mode."""

import pytest

from engine.shared.config import ClusterConfig, ParallelConfig
from engine.shared.scope import EVERYTHING, MissingRank, Scope, front_end_scope

HERE = ClusterConfig(node="a")


def test_internal_balancing_reaches_every_engine() -> None:
    scope = front_end_scope(ParallelConfig(), HERE)
    assert scope == EVERYTHING
    assert scope.contains(7, "elsewhere")


def test_hybrid_balancing_reaches_engines_of_same_node() -> None:
    scope = front_end_scope(ParallelConfig(data_parallel_lb="hybrid"), HERE)
    assert scope == Scope(node="a")
    assert scope.contains(7, "a")
    assert not scope.contains(7, "b")


def test_external_balancing_reaches_one_engine_on_any_node() -> None:
    parallel = ParallelConfig(data_parallel_lb="external", data_parallel_rank=7)
    scope = front_end_scope(parallel, HERE)
    assert scope.contains(7, "b")
    assert not scope.contains(6, "a")


def test_external_balancing_needs_to_know_its_engine() -> None:
    with pytest.raises(MissingRank, match="--data-parallel-rank"):
        front_end_scope(ParallelConfig(data_parallel_lb="external"), HERE)


@pytest.mark.parametrize(
    ("parallel", "engines", "first_rank"),
    [
        (ParallelConfig(data_parallel_size=4), 4, None),
        (ParallelConfig(data_parallel_size=4, data_parallel_size_local=2), 2, None),
        (ParallelConfig(data_parallel_size_local=2, data_parallel_start_rank=6), 2, 6),
        (ParallelConfig(data_parallel_size=4, data_parallel_rank=3), 1, 3),
        (ParallelConfig(data_parallel_size_local=0), 0, None),
    ],
)
def test_node_runs_configured_number_of_engines_from_start_rank(
    parallel: ParallelConfig, engines: int, first_rank: int | None
) -> None:
    assert parallel.engines_on_node == engines
    assert parallel.rank_on_node(0) == first_rank
    if first_rank is not None:
        assert parallel.rank_on_node(1) == first_rank + 1
