"""The settings that the supervisor passes to its processes."""

import msgspec

from engine.shared.config import ParallelConfig
from server.config import ServeConfig
from server.fleet.roles import coordinator_role, engine_role


def test_engine_number_on_node_is_independent_of_rank() -> None:
    config = ServeConfig(parallel=ParallelConfig(data_parallel_size_local=2))
    for start in (None, 6):
        parallel = msgspec.structs.replace(config.parallel, data_parallel_start_rank=start)
        node = msgspec.structs.replace(config, parallel=parallel)
        launches = [engine_role(node, place).launch(1) for place in range(2)]
        assert [launch.config.parallel.number_on_node for launch in launches] == [0, 1]


def test_only_the_first_coordinator_of_a_new_cluster_has_no_predecessors() -> None:
    for is_new, told in (True, [False, True, True]), (False, [True, True, True]):
        role = coordinator_role(ServeConfig(), is_new=is_new)
        assert [role.launch(each).has_predecessors for each in range(3)] == told
