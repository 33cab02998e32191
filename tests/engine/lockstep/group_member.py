"""A process that is one engine of a lockstep group, with one command per line."""

import threading
from typing import Any

from engine.distributed.engines import EngineGroup
from engine.distributed.spec import GroupBroken
from engine.executor.simulated import SimulatedExecutor
from engine.lockstep.grouping import GroupConnection, Grouping
from engine.shared.config import BUNDLED_MODEL, EngineConfig, ModelConfig
from engine.shared.messages import FormGroup, GroupMember, GroupStatus
from tests.engine.processes import answer_lines


class Member:
    """The commands; results are JSON."""

    def begin(self, rank: int) -> None:
        self.connection = GroupConnection()
        self.reports: list[GroupStatus] = []
        config = EngineConfig(model=ModelConfig(model=str(BUNDLED_MODEL)))
        self.grouping = Grouping(
            GroupMember(rank, rank),
            SimulatedExecutor(config, vocab_size=100),
            self.connection,
            host="127.0.0.1",
            timeout=200.0,
            report=self.reports.append,
        )

    def ordered(self, topology: int, ranks: list[int], address: str) -> list[Any]:
        """Execute an order; return the engine's state, and its rank if it has joined."""
        members = [GroupMember(rank, rank) for rank in ranks]
        group = self.grouping.ordered(FormGroup(topology, members, address))
        assignment: list[int] = []
        if group is not None:
            self.group: EngineGroup = group
            assignment = [group.rank, group.size, group.topology]
        return [self.reports[-1].state, self.reports[-1].address, assignment]

    def rows(self, row: list[int]) -> list[list[int]]:
        return self.group.all_gather_rows(row).wait()

    def hears_of(self, topology: int, seconds: float) -> None:
        """Receive news of a newer group after a delay, like the receiver thread."""
        threading.Timer(seconds, self.connection.ordered, [topology]).start()

    def leave_broken(self) -> str:
        self.grouping.leave_broken(GroupBroken("lost"))
        return self.reports[-1].state


def main() -> None:
    answer_lines(Member(), {GroupBroken: "broken"})


if __name__ == "__main__":
    main()
