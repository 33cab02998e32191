"""Distributes test files over the processes of `pytest -n`.

Each file runs in one process, so that fixtures are built once. Tests of whole stacks mostly wait,
for processes to start and for timeouts, while most others keep a core busy. So all processes but
one begin with stacks, and that one with the others; when one kind is done, all processes run the
rest. Longer files come first, so that all processes finish at about the same time.
"""

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
KEPT_AS = "swell/seconds"
"""Key in pytest's cache for the seconds that each file took in its last run."""
BYTES_PER_SECOND = 4000
"""Estimated speed for files without a recorded time: longer files have more tests."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Producer
) -> "StacksBesideOthers | None":
    """Use this scheduler with `--dist loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    seconds = Seconds(config)
    config.pluginmanager.register(seconds)
    return StacksBesideOthers(config, log, seconds)


class Seconds:
    """Durations of files: recorded in the last run, or estimated."""

    def __init__(self, config: pytest.Config) -> None:
        self._cache = getattr(config, "cache", None)  # None with `-p no:cacheprovider`
        self._keeps = config.args_source is config.ArgsSource.TESTPATHS and not (
            config.getoption("keyword") or config.getoption("quick")
        )
        known = None if self._cache is None else self._cache.get(KEPT_AS, None)
        self._known: dict[str, float] = known or {}
        self._taken: defaultdict[str, float] = defaultdict(float)

    def of(self, file: str) -> float:
        """Return a file's recorded duration, or an estimate from its length."""
        return self._known.get(file, (ROOT / file).stat().st_size / BYTES_PER_SECOND)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a test phase."""
        self._taken[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Save the durations, unless only some tests were run."""
        is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self._cache is not None and self._keeps and is_whole:
            self._cache.set(KEPT_AS, self._known | self._taken)


class StacksBesideOthers(LoadFileScheduling):  # type: ignore[misc]
    """Keeps stacks in all processes but one, while there are other files for that one."""

    def __init__(self, config: pytest.Config, log: Producer, seconds: Seconds) -> None:
        super().__init__(config, log)
        self._seconds = seconds

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next_file(node), last=False)
        super()._assign_work_unit(node)

    def _next_file(self, node: WorkerController) -> str:
        with_stacks = sum(self._runs_stacks(other) for other in self.nodes if other is not node)
        wants_stacks = with_stacks < max(1, len(self.nodes) - 1)
        files: list[str] = sorted(self.workqueue, key=self._seconds.of, reverse=True)
        fitting = (file for file in files if starts_stacks(file) == wants_stacks)
        return next(fitting, files[0])

    def _runs_stacks(self, node: WorkerController) -> bool:
        return any(
            starts_stacks(file) and not all(is_done.values())
            for file, is_done in self.assigned_work[node].items()
        )


@cache
def starts_stacks(file: str) -> bool:
    """Return whether a file has tests with the marker `stack`."""
    return "pytest.mark.stack" in (ROOT / file).read_text(encoding="utf-8")
