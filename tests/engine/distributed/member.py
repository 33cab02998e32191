"""A process that joins groups on command: one JSON list [name, *arguments] per line.

With the argument `device`, its tensors are on a simulated device (`strict_device`).
"""

import contextlib
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.distributed.engines import EngineGroup, join_engines
from engine.distributed.grid import Grid, join_grid
from engine.distributed.group import CPU, Group, PendingRows, join_group
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.models.layers import Chain
from engine.models.parallel.balance import ExpertBalance, expert_share
from engine.models.parallel.experts import (
    DistributedExperts,
    ExpertGroup,
    SendingRule,
)
from engine.models.parallel.tensors import VocabParallelEmbedding, VocabParallelHead, part_of
from tests.engine.distributed import strict_device
from tests.engine.processes import answer_lines


class Member:
    """The commands; results are JSON."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.group: Group | None = None
        self.grid: Grid | None = None
        self.engines: EngineGroup
        self.pending: PendingRows | None = None

    def join(self, address: str, rank: int, size: int, topology: int, timeout: float) -> str:
        spec = GroupSpec(address, rank, size, topology, timeout)
        self.group = join_group(spec, self.device)
        return "joined"

    def policies(self) -> list[tuple[str, int]]:
        """Return the name and the scheduling policy of each thread."""
        found = []
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has exited
                name = (thread / "comm").read_text().strip()
                found.append((name, os.sched_getscheduler(int(thread.name))))
        return found

    def rows(self, row: list[int]) -> list[list[int]]:
        return self._group().all_gather_rows(row).wait()

    def begin_rows(self, row: list[int]) -> bool:
        self.pending = self._group().all_gather_rows(row)
        return self.pending.done()

    def end_rows(self) -> list[list[int]]:
        assert self.pending is not None
        table = self.pending.wait()
        assert self.pending.done()
        return table

    def all_to_all(self, sent: list[int], received: list[int], dtype: str) -> list[float]:
        rank = self._group().rank
        values = [100.0 * rank + i for i in range(sum(sent))]
        rows = self._tensor(values, getattr(torch, dtype)).unsqueeze(1).repeat(1, 3)
        out = self._group().all_to_all(rows, sent, received)
        assert out.shape == (sum(received), 3)
        return out[:, 2].tolist()

    def all_gather(self, counts: list[int]) -> list[float]:
        rank = self._group().rank
        rows = torch.full((counts[rank], 2), float(rank), device=self.device)
        return self._group().all_gather(rows, counts)[:, 0].tolist()

    def all_reduce(self, values: list[float]) -> list[float]:
        return self._group().all_reduce(self._tensor(values)).tolist()

    def all_to_all_counts(self, counts: list[int]) -> list[int]:
        return self._group().all_to_all_counts(counts)

    def all_gather_row(self, row: list[int]) -> list[list[int]]:
        return self._group().all_gather_row(row)

    def all_gather_counts(self, count: int) -> list[int]:
        return self._group().all_gather_counts(count)

    def broadcast(self, values: list[float]) -> list[float]:
        return self._group().broadcast(self._tensor(values)).tolist()

    def experts(self, num_tokens: int, together: bool) -> bool:
        """Run a layer of 6 experts, each of which multiplies by its number; return if it is right.

        Tokens go to all ranks, or to those that need them.
        """
        group = self._group()
        rule = SendingRule() if together else SendingRule(few_tokens=0, max_needed=2.0)
        shared = ExpertGroup(6, 2, self.device)
        shared.rule = rule
        shared.join(group)
        layer = DistributedExperts(shared)
        share = expert_share(6, group.rank, group.size)
        layer.set_local_experts(share.start, share, lambda expert: Chain(lambda x: x * expert))
        x = self._tensor([[float(10 * group.rank + i), 1.0] for i in range(num_tokens)]).view(-1, 2)
        first = torch.arange(num_tokens, device=self.device)
        chosen = torch.stack(((first + group.rank) % 6, (first + 3) % 6), dim=1)
        weights = torch.full((num_tokens, 2), 0.5, device=self.device)
        shared.begin_step(num_tokens)
        expected = x * chosen.sum(1, keepdim=True) * 0.5
        return bool(torch.equal(layer(x, chosen, weights), expected))

    def balanced_experts(self, num_tokens: int, steps: int) -> list[Any]:
        """Run a layer of 6 experts that move when each step begins; all choose the first two.

        Return whether all was right, what is held at last, the imbalance and the moves.
        """
        group = self._group()
        balance = ExpertBalance(1, 6, 5, 1, self.device)
        balance.reset(group.size)
        shared = ExpertGroup(6, 2, self.device, balance=balance)
        shared.prepare(group.rank, group.size)
        shared.join(group)
        layer = DistributedExperts(shared)
        layer.set_local_experts(
            *shared.local_copies(0), lambda expert: Chain(lambda x: x * (expert + 1))
        )
        x = self._tensor([[float(10 * group.rank + i), 1.0] for i in range(num_tokens)]).view(-1, 2)
        first = torch.zeros(num_tokens, device=self.device, dtype=torch.int64)
        chosen = torch.stack((first, first + 1), dim=1)
        weights = torch.full((num_tokens, 2), 0.5, device=self.device)
        right = True
        for _ in range(steps):
            shared.begin_step(num_tokens)
            if shared.next_change() is not None:
                layer.change()
            right = right and bool(torch.equal(layer(x, chosen, weights), x * 1.5))
        return [right, list(layer.share), balance.imbalance, balance.moved_layers]

    def join_engines(self, addresses: list[str], rank: int, engines: int, shards: int) -> None:
        """Act as one process of an engine, connected to its peers and to other engines."""
        engine, shard = divmod(rank, shards)
        self.join_grid(addresses[0], rank, engines, shards)
        spec = GroupSpec(addresses[1], engine, engines, 4, 20.0)
        self.engines = join_engines(spec, self.device, shard=shard, shards=shards)

    def gather_leaders(self, row: list[int]) -> list[list[int]]:
        return self.engines.all_gather_rows(row).wait()

    def sharded_experts(self, num_tokens: int, base: int) -> bool:
        """Run a layer of 6 experts as `experts` does, in a step of engines of several processes.

        Partial results are summed over the processes of an engine.
        """
        assert self.grid is not None
        group, own = self.engines.processes, self.grid.shards
        shared = ExpertGroup(6, 2, self.device, own)
        shared.join(group)
        layer = DistributedExperts(shared)
        share = expert_share(6, group.rank, group.size)
        layer.set_local_experts(share.start, share, lambda expert: Chain(lambda x: x * expert))
        x = self._tensor([[float(base + i), 1.0] for i in range(num_tokens)]).view(-1, 2)

        def routed(tokens: torch.Tensor) -> torch.Tensor:
            first = tokens[:, 0].to(torch.int64)
            chosen = torch.stack((first % 6, (first + 3) % 6), dim=1)
            halves = torch.full((len(tokens), 2), 0.5, device=self.device)
            made: torch.Tensor = layer(tokens, chosen, halves)
            return made

        shared.begin_step(num_tokens)
        total = own.all_reduce(shared.compute_own_tokens(routed, x, None))
        shared.end_step()
        first = x[:, :1]
        return bool(torch.equal(total, x * (first % 6 + (first + 3) % 6) * 0.5))

    def sum_of_shards(self) -> list[float]:
        assert self.grid is not None
        return self.grid.shards.all_reduce(self._tensor([1.0])).tolist()

    def close_engines(self) -> None:
        self.engines.close()
        self.close_grid()

    def vocabulary(self) -> list[list[float]]:
        """Embed tokens with a sharded table, and compute logits with it."""
        group = self._group()
        part = part_of(7, group.rank, group.size)
        table = torch.arange(14.0, device=self.device).view(7, 2)[part].contiguous()
        embed = VocabParallelEmbedding(group, partial(torch.embedding, table), part)
        states = embed(self._tensor([6, 0, 3], torch.int64))
        logits = VocabParallelHead(group, lambda x: x @ table.T, 7)(states)
        return [states.tolist(), logits.tolist()]

    def join_grid(self, address: str, rank: int, stages: int, shards: int) -> None:
        """Join a grid; ranks enumerate the shards of the first stage first."""
        spec = GroupSpec(address, rank, stages * shards, 0, 20.0)
        self.stage = rank // shards
        self.grid = join_grid(spec, (stages, shards), divmod(rank, shards), self.device)

    def pass_on(self, stages: int, values: list[float]) -> list[float]:
        """Send two tensors through all stages; each adds one and sums over its shards."""
        assert self.grid is not None
        stage, grid = self.stage, self.grid
        arriving = []
        if stage:
            empty = torch.empty(len(values), device=self.device)
            arriving = [grid.begin_receive(torch.empty_like(empty)) for _ in range(2)]
        states = [self._tensor(values), self._tensor(values) * 10]
        leaving = []
        for i in range(2):
            if stage:
                states[i] = arriving[i].wait()
            states[i] = grid.shards.all_reduce(states[i] + 1)
            if stage < stages - 1:
                leaving.append(grid.begin_send(states[i]))
        for each in leaving:
            each.wait()
        return [*states[0].tolist(), *states[1].tolist()]

    def close_grid(self) -> None:
        assert self.grid is not None
        self.grid.close()
        self.grid = None

    def on_device(self) -> bool:
        return self.device != CPU

    def mixes(self) -> str:
        """Return the error of a sum over CPU and device tensors, if any."""
        try:
            self._group().all_reduce(torch.ones(1))
            torch.ones(2) + torch.ones(2, device=self.device)
        except AssertionError as error:
            return str(error)
        return ""

    def abort_after(self, seconds: float) -> None:
        threading.Timer(seconds, self._group().abort).start()

    def close(self) -> None:
        self._group().close()
        self.group = self.pending = None

    def has_group(self) -> bool:
        return self.group is not None

    def left(self) -> list[int]:
        """Return the numbers of threads and sockets of this process."""
        links = []
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                links.append(os.readlink(path))
        return [len(os.listdir("/proc/self/task")), sum("socket" in link for link in links)]

    def _tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _group(self) -> Group:
        assert self.group is not None
        return self.group


def main() -> None:
    torch.set_num_threads(1)
    device = CPU
    if sys.argv[1:] == ["device"]:
        device = strict_device.DEVICE
        strict_device.install()
    answer_lines(Member(device), {GroupBroken: "broken"}, timed=True)


if __name__ == "__main__":
    main()
