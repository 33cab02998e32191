"""How files of tests are spread over processes: a machine has room for one engine of containers.

The tests of containers wait more than they compute, and are by far the longest: they begin, all in
one process. So do those of network namespaces, whose nodes have fixed addresses.
"""

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
CONTAINERS = "containers"
ALONE = {"tests.deploy.conftest": CONTAINERS, "tests.deploy.namespaces": "namespaces"}
"""What files import whose tests cannot run beside each other, and what such files are called."""


class ContainersFirst(LoadFileScheduling):  # type: ignore[misc]
    """Has files of one group in one process, and those of containers before all others."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        if CONTAINERS in self.workqueue:
            self.workqueue.move_to_end(CONTAINERS, last=False)
        super()._assign_work_unit(node)


@cache
def group(file: str) -> str:
    """Return the name of what a file belongs to: a group, or else the file itself."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((name for module, name in ALONE.items() if f"from {module} import" in text), file)
