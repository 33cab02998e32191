"""Distribution of test files over processes: a machine has capacity for one container engine.

Container tests mostly wait and take by far the longest, so they start first, all in
one process. So do network namespace tests, whose nodes have fixed addresses.
"""

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
CONTAINERS = "containers"
ALONE = {"tests.deploy.conftest": CONTAINERS, "tests.deploy.namespaces": "namespaces"}
"""Group names by import, for test files that cannot run concurrently."""


class ContainersFirst(LoadFileScheduling):  # type: ignore[misc]
    """Runs the files of a group in one process, and container tests before all others."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        if CONTAINERS in self.workqueue:
            self.workqueue.move_to_end(CONTAINERS, last=False)
        super()._assign_work_unit(node)


@cache
def group(file: str) -> str:
    """Return the group of a test file, or the file's own name if it has none."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((name for module, name in ALONE.items() if f"from {module} import" in text), file)
