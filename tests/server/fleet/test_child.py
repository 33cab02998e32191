"""Processes that are killed along with a child."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from server.fleet.child import Child, Program
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow  # starts processes

STARTS_ANOTHER = """
import signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
print(subprocess.Popen([sys.executable, "-c", deaf], stdout=sys.stderr).pid, flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
time.sleep(600)
"""


@pytest.mark.parametrize("end", [Child.kill, Child.terminate])
def test_a_child_leaves_no_process_that_it_has_started(end: Callable[[Child], None]) -> None:
    asyncio.run(end_a_child(end))


async def end_a_child(end: Callable[[Child], None]) -> None:
    """End a child that has its own child, as vLLM engines have workers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTS_ANOTHER, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    grandchild = psutil.Process(int(await process.stdout.readline()))
    ours, theirs = socket.socketpair()
    child = Child("engine 0", process, ours)
    child.attach(Program(name="engine 0", module="", launch=None, on_status=print, on_line=print))
    end(child)
    await child.wait()
    theirs.close()
    await asyncio.to_thread(grandchild.wait, PATIENCE)
