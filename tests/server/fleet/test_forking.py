"""Real processes forked from a template, whatever happens to the template."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.shared.messages import ChildReady, ChildStatus
from server.fleet.child import Child, Program, has_pidfds, watch_children_without_threads
from server.fleet.forking import Template
from tests.server.conftest import RunLoop
from tests.support.waiting import until, until_async

pytestmark = [
    pytest.mark.slow,  # it starts processes
    pytest.mark.skipif(
        not has_pidfds(), reason="this system cannot give a fork to its grandparent"
    ),
]

PROCESS = """
import os, random, signal, sys, threading
from engine.shared.lifeline import Lifeline
lifeline = Lifeline.from_environment()
launch = lifeline.read_launch(dict[str, int])
print("it says", launch["number"], flush=True)
if "code" in launch:
    sys.exit(launch["code"])
loaded = "loaded" in sys.modules
lifeline.ready(f"{loaded} {os.getsid(0) == os.getpid()} {random.random()}")
lifeline.watch()
threading.Event().wait()
"""
LOADED = ""
THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
DIES = "raise SystemExit(7)"
NEVER = """
import pathlib, signal
pathlib.Path(__file__).with_name("begun").touch()
signal.pause()
"""
TEMPLATE = """
import importlib
from engine.shared.template import run
run("forked_one", lambda _: importlib.import_module("loaded"))
"""


class Place:
    """The programs of a test and the output of its processes."""

    def __init__(self, directory: Path, loaded: str) -> None:
        for name, text in (
            ("forked_one", PROCESS), ("loaded", loaded), ("forked_one_template", TEMPLATE)
        ):  # fmt: skip
            (directory / f"{name}.py").write_text(text)
        self.directory = directory
        self.path = os.pathsep.join([str(directory), *filter(None, sys.path)])
        self.statuses: list[ChildStatus] = []
        self.lines: list[str] = []

    async def template(self, forks: int = 9) -> Template:
        template = Template(forks)
        program = Program(
            name="template",
            module="forked_one_template",
            launch=None,
            environment={"PYTHONPATH": self.path},
            on_status=template.on_status,
            on_line=lambda line: None,
        )
        await template.load(program, None)
        return template

    async def start(self, template: Template, number: int = 1, **more: int) -> Child:
        program = Program(
            name=f"process {number}",
            module="forked_one",
            launch={"number": number, **more},
            environment={"PYTHONPATH": self.path},
            on_status=self.statuses.append,
            on_line=self.lines.append,
        )
        return await template.start(program)

    async def details(self, count: int) -> list[list[str]]:
        """Wait until this many processes serve; return the report of each."""
        await until_async(lambda: len(self.statuses) >= count, "they serve")
        assert all(isinstance(each, ChildReady) for each in self.statuses)
        return [each.detail.split() for each in self.statuses if isinstance(each, ChildReady)]


async def end(*children: Child) -> None:
    for each in children:
        each.kill()
        await each.wait()


@pytest.fixture
def run_loop() -> RunLoop:
    watch_children_without_threads()
    return asyncio.run


async def test_forks_share_loaded_modules_and_nothing_else(tmp_path: Path) -> None:
    place = Place(tmp_path, LOADED)

    template = await place.template()
    children = await asyncio.gather(place.start(template, 1), place.start(template, 2))
    details = await place.details(2)
    await template.close()
    assert [each[:2] for each in details] == [["True", "True"]] * 2
    assert details[0][2] != details[1][2]  # random numbers
    assert {psutil.Process(each.pid).ppid() for each in children} == {os.getpid()}
    await until_async(lambda: len(place.lines) == 2, "both have said something")
    assert sorted(place.lines) == ["it says 1", "it says 2"]
    await end(*children)


async def test_exit_code_of_a_fork_is_reported(tmp_path: Path) -> None:
    place = Place(tmp_path, LOADED)

    template = await place.template()
    child = await place.start(template, 1, code=5)
    assert (await child.wait()).code == 5
    killed = await place.start(template, 2)
    await place.details(1)
    os.kill(killed.pid, signal.SIGKILL)
    assert (await killed.wait()).code == -signal.SIGKILL
    assert list(killed.last_lines) == ["it says 2"]
    await template.close()


async def test_forks_are_unaffected_by_exit_of_template(tmp_path: Path) -> None:
    place = Place(tmp_path, LOADED)

    template = await place.template()
    child = await place.start(template)
    await place.details(1)
    pid = template.pid
    assert os.getpgid(child.pid) != pid, "the template is killed as a process group"
    await template.close()
    assert not psutil.pid_exists(pid)
    assert child.alive
    child.terminate()
    assert (await child.wait()).code == -signal.SIGTERM


async def test_a_template_ends_with_its_last_fork(tmp_path: Path) -> None:
    place = Place(tmp_path, LOADED)

    template = await place.template(forks=2)
    children = [await place.start(template, number) for number in range(2)]
    await until_async(lambda: not template.pid, "it has ended")
    children.append(await place.start(template, 3))
    assert sorted(each[0] for each in await place.details(3)) == ["False", "True", "True"]
    await template.close()
    await end(*children)


@pytest.mark.parametrize("loaded", [DIES, THREAD], ids=["it dies", "it has a thread"])
async def test_unforkable_process_loads_its_libraries_itself(tmp_path: Path, loaded: str) -> None:
    place = Place(tmp_path, loaded)

    template = await place.template()
    child = await place.start(template)
    assert (await place.details(1))[0][0] == "False"
    await end(child)
    await template.close()


async def test_template_that_fails_to_load_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.fleet.forking.LOAD_TIMEOUT", 0.3)
    place = Place(tmp_path, NEVER)

    template = await place.template()
    children = await asyncio.gather(place.start(template, 1), place.start(template, 2))
    assert [each[0] for each in await place.details(2)] == ["False", "False"]
    await until_async(lambda: not template.pid, "it has ended")
    await template.close()
    await end(*children)


async def test_processes_start_without_killed_template(tmp_path: Path) -> None:
    place = Place(tmp_path, LOADED)

    template = await place.template()
    forked = await place.start(template)
    os.kill(template.pid, signal.SIGKILL)
    other = await place.start(template)
    assert sorted(each[0] for each in await place.details(2)) == ["False", "True"]
    await end(forked, other)
    await template.close()


async def test_processes_start_without_template_that_does_not_answer(tmp_path: Path) -> None:
    place = Place(tmp_path, LOADED)

    template = await place.template()
    forked = await place.start(template)
    psutil.Process(template.pid).suspend()
    template._connection.settimeout(0.1)
    other = await place.start(template)
    assert sorted(each[0] for each in await place.details(2)) == ["False", "True"]
    await until_async(lambda: not template.pid, "it has ended")
    await end(forked, other)
    await template.close()


async def test_template_and_forks_leave_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, LOADED)

    def open_here() -> int:
        return psutil.Process().num_fds()

    # Garbage of earlier tests in this process can be collected at any time.
    gc.collect()

    before = open_here()
    children = set(psutil.Process().children())
    template = await place.template()
    forked = [await place.start(template, number) for number in range(3)]
    await place.details(3)
    await template.close()
    await end(*forked)
    await until_async(lambda: open_here() <= before, "all are closed")
    assert set(psutil.Process().children()) <= children  # zombies would be among them


def test_loading_template_exits_with_its_supervisor(tmp_path: Path) -> None:
    place = Place(tmp_path, NEVER)
    program = """
import asyncio, pathlib
from server.fleet.child import Program
from server.fleet.forking import Template

async def run():
    template = Template(9)
    program = Program(
        name="template", module="forked_one_template", launch=None,
        on_status=template.on_status, on_line=print,
    )
    await template.load(program, None)
    print(template.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(run())
"""

    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": place.path},
    ) as supervisor:
        assert supervisor.stdout is not None
        try:
            pid = int(supervisor.stdout.readline())
            until((tmp_path / "begun").exists, "it loads")
        finally:
            supervisor.kill()
    until(lambda: not _runs(pid), "the template ends")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
