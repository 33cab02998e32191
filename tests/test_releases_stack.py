"""The last release and this one in one cluster: every mix of their processes serves."""

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import SWELL, end_processes
from tests.support.forking import ForkExec
from tests.support.http import ADMIN_KEY, complete, fetch, incarnations, ready_ranks
from tests.support.load import Load
from tests.support.ports import free_ports, port_of_a_coordinator
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[1]
LAST_RELEASE = "dafdc78f9a868c91c3941f5164046ea162f4fb13"
"""The commit of the last release, which speaks the protocol before this one's."""


@pytest.fixture(scope="module")
def last_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the packages of the last release."""
    directory = tmp_path_factory.mktemp("last-release")
    known = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", LAST_RELEASE], capture_output=True, check=False
    )
    if known.returncode:
        pytest.skip(f"the history has no {LAST_RELEASE[:7]}: a shallow clone, or no repository")
    archive = directory / "release.tar"
    packages = ("engine", "server", "coordinator")
    subprocess.run(
        ["git", "-C", str(ROOT), "archive", "-o", str(archive), LAST_RELEASE, *packages], check=True
    )
    subprocess.run(["tar", "-xf", str(archive), "-C", str(directory)], check=True)
    return directory


class Cluster:
    """Processes of two releases, started one by one."""

    def __init__(self, directory: Path, last_release: Path, forks: ForkExec) -> None:
        self._last_release = last_release
        self._forks = forks
        key = directory / "key"
        key.write_text("a shared secret of these tests")
        self._flags = (
            "--coordinator", f"127.0.0.1:{port_of_a_coordinator()}", "--cluster-key-file", str(key),
            "--heartbeat-interval", "0.2", "--log-level", "warning",
        )  # fmt: skip
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, release: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a process of the "old" or the "new" release."""
        command = [SWELL, *arguments, *self._flags]
        if release == "new":
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        else:
            with self._forks.paused():  # forks would have this release's modules
                process = subprocess.Popen(
                    command,
                    # It imports from the current directory.
                    cwd=self._last_release,
                    env={**os.environ, "PYTHONPATH": str(self._last_release)},
                    stdin=subprocess.DEVNULL,
                )
        self._running.append(process)
        return process

    def front_end(self, release: str) -> str:
        """Start a front end; return its address once it serves."""
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        flags = ("--port", url.rpartition(":")[2], "--admin-key", ADMIN_KEY)
        self.start(release, "api-server", *flags)
        until(lambda: fetch(f"{url}/health").status == 200, "the front end answers")
        return url

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        assert process.wait(PATIENCE) == 0
        self._running.remove(process)

    def stop(self) -> None:
        end_processes(self._running)


@pytest.fixture
def cluster(tmp_path: Path, last_release: Path, forks: ForkExec) -> Iterator[Cluster]:
    made = Cluster(tmp_path, last_release, forks)
    yield made
    made.stop()


ENGINE = ("engine", "--executor", "simulated", "--simulated-step-us", "3000")


def test_both_releases_serve_together_with_either_coordinator(cluster: Cluster) -> None:
    coordinator = cluster.start("old", "coordinator")
    urls = {release: cluster.front_end(release) for release in ("old", "new")}
    for rank, release in enumerate(("new", "old")):
        cluster.start(release, *ENGINE, "--data-parallel-rank", str(rank))
        for url in urls.values():
            assert incarnations(url, range(rank + 1))
    answers = {complete(url, "Act", 24, rank, seed=1) for url in urls.values() for rank in (0, 1)}
    assert len(answers) == 1, "every mix gives the same answer"

    with Load(urls["new"], 4).running() as load:
        load.goes_on()
        load.turn_to(urls["old"])
        load.goes_on()
        for release in ("new", "old"):
            cluster.end(coordinator)
            load.goes_on()
            coordinator = cluster.start(release, "coordinator")
            for url in urls.values():
                until(partial(sees_both, url), "engines are known again")
            load.goes_on()
            load.turn_to(urls[release])
            load.goes_on()
    load.check()


def sees_both(url: str) -> bool:
    return ready_ranks(url) == {0, 1}
