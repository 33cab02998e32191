"""A process that joins groups as it is told: one JSON list [name, *arguments] a line."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from engine.distributed.group import Group, PendingRows, join_group
from engine.distributed.spec import GroupBroken, GroupSpec


class Member:
    """What can be asked of it; answers are JSON too."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.pending: PendingRows | None = None

    def join(self, address: str, rank: int, size: int, topology: int, timeout: float) -> str:
        self.group = join_group(GroupSpec(address, rank, size, topology, timeout))
        return "joined"

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
        rows = torch.tensor(values, dtype=getattr(torch, dtype)).unsqueeze(1).repeat(1, 3)
        out = self._group().all_to_all(rows, sent, received)
        assert out.shape == (sum(received), 3)
        return out[:, 2].tolist()

    def all_gather(self, counts: list[int]) -> list[float]:
        rank = self._group().rank
        rows = torch.full((counts[rank], 2), float(rank))
        return self._group().all_gather(rows, counts)[:, 0].tolist()

    def all_reduce(self, values: list[float]) -> list[float]:
        return self._group().all_reduce(torch.tensor(values)).tolist()

    def abort_after(self, seconds: float) -> None:
        threading.Timer(seconds, self._group().abort).start()

    def close(self) -> None:
        self._group().close()
        self.group = self.pending = None

    def has_group(self) -> bool:
        return self.group is not None

    def left(self) -> list[int]:
        """Threads and sockets of this process."""
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return [len(os.listdir("/proc/self/task")), sum("socket" in link for link in links)]

    def _group(self) -> Group:
        assert self.group is not None
        return self.group


def main() -> None:
    torch.set_num_threads(1)
    member = Member()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        began = time.monotonic()
        answer: Any
        try:
            answer = {"ok": getattr(member, name)(*arguments)}
        except GroupBroken as error:
            answer = {"broken": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
