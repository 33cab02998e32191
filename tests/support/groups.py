"""How files of tests are spread over the processes of `pytest -n`.

Each file is run by one process, so that what its tests share is made once. Tests of whole stacks
wait more than they compute, for processes that start and for timeouts, while most others keep a
core busy. So all processes but one begin with stacks, and that one with the others; whichever kind
is done first, the rest is shared.
"""

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Producer
) -> "StacksBesideOthers | None":
    """Spread files in this module's way with `--dist loadfile`."""
    return StacksBesideOthers(config, log) if config.getoption("dist") == "loadfile" else None


class StacksBesideOthers(LoadFileScheduling):  # type: ignore[misc]
    """Has stacks in all processes but one as long as there is anything else for that one."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next_file(node), last=False)
        super()._assign_work_unit(node)

    def _next_file(self, node: WorkerController) -> str:
        with_stacks = sum(self._runs_stacks(other) for other in self.nodes if other is not node)
        wants_stacks = with_stacks < max(1, len(self.nodes) - 1)
        files: list[str] = sorted(self.workqueue, key=size, reverse=True)
        fitting = (file for file in files if starts_stacks(file) == wants_stacks)
        return next(fitting, files[0])

    def _runs_stacks(self, node: WorkerController) -> bool:
        return any(
            starts_stacks(file) and not all(is_done.values())
            for file, is_done in self.assigned_work[node].items()
        )


@cache
def starts_stacks(file: str) -> bool:
    """Whether a file has tests with the marker `stack`."""
    return "pytest.mark.stack" in (ROOT / file).read_text(encoding="utf-8")


@cache
def size(file: str) -> int:
    """Return the bytes of a file: the longer, the more tests, so that short ones come last."""
    return (ROOT / file).stat().st_size
