"""Assignment of devices to processes of engines."""

import pytest

from engine.executor.loading import TooFewDevices, device_number
from engine.shared.config import ParallelConfig


def place(number: int, rank: int, size: int = 1) -> ParallelConfig:
    return ParallelConfig(
        data_parallel_rank_local=number, data_parallel_rank=rank, tensor_parallel_size=size
    )


def test_engines_whose_ranks_interleave_between_nodes_do_not_share_a_device() -> None:
    # The coordinator assigned ranks 0 and 2 to one node with two devices, 1 and 3 to the other.
    for ranks in ((0, 2), (1, 3)):
        devices = [device_number(place(number, rank), 0, 2) for number, rank in enumerate(ranks)]
        assert devices == [0, 1]


def test_processes_of_one_engine_get_consecutive_devices() -> None:
    parallel = place(1, rank=6, size=4)
    assert [device_number(parallel, worker, 8) for worker in range(4)] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("parallel", "count", "numbers"),
    [
        (place(2, rank=0), 2, "engine 2 of this node needs CUDA device 2, but only 2 are visible"),
        (place(0, rank=5, size=2), 1, "needs CUDA devices 0 to 1, but only 1 is visible"),
        (place(1, rank=1, size=4), 6, "needs CUDA devices 4 to 7, but only 6 are visible"),
    ],
)
def test_too_few_devices_are_refused_with_counts(
    parallel: ParallelConfig, count: int, numbers: str
) -> None:
    with pytest.raises(TooFewDevices, match=numbers):
        device_number(parallel, 0, count)


@pytest.mark.parametrize(
    ("parallel", "device"),
    [
        (ParallelConfig(data_parallel_rank=5, data_parallel_size_local=1), 0),
        (ParallelConfig(data_parallel_rank=5, data_parallel_size_local=4), 1),
        (ParallelConfig(data_parallel_rank=5, data_parallel_rank_local=3), 3),
        (ParallelConfig(), 0),
    ],
)
def test_standalone_engine_uses_device_of_its_number_on_node(
    parallel: ParallelConfig, device: int
) -> None:
    assert device_number(parallel, 0, 8) == device
