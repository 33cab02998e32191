"""The part of a model that each process computes, and its node."""

import pytest

from engine.executor.layout import Layout
from engine.executor.loading import TooFewDevices, device_number
from engine.shared.config import ParallelConfig


@pytest.mark.parametrize(
    "layout",
    [Layout(1, 1), Layout(2, 1, 2), Layout(4, 1, 2), Layout(4, 2, 2), Layout(6, 2, 3)],
    ids=str,
)
def test_each_node_has_consecutive_stages_and_the_leaders_has_the_last(layout: Layout) -> None:
    found = []
    for node in [*range(1, layout.nodes), 0]:
        ranks = layout.on_node(node)
        assert sorted(map(layout.index_on_node, ranks)) == list(range(layout.size // layout.nodes))
        positions = sorted(map(layout.position, ranks))
        assert {position.shard for position in positions} == set(range(layout.shards))
        found += positions
    assert layout.node(0) == 0
    assert found == [(s, part) for s in range(layout.stages) for part in range(layout.shards)]


def test_a_node_needs_devices_for_its_own_stages_only() -> None:
    parallel = ParallelConfig(
        data_parallel_size=1,
        data_parallel_rank_local=0,
        pipeline_parallel_size=4,
        nnodes=2,
        master_addr="10.0.0.1",
    )
    layout = Layout.of(parallel)
    devices = [device_number(parallel, layout.index_on_node(rank), 2) for rank in range(4)]
    assert list(zip(map(layout.node, range(4)), devices, strict=True)) == [
        (0, 1),  # the leader's is the last stage
        (1, 0),
        (1, 1),
        (0, 0),
    ]
    with pytest.raises(TooFewDevices, match="needs CUDA devices 0 to 1"):
        device_number(parallel, 0, 1)
