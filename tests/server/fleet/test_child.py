"""Processes that are killed along with a child."""

import asyncio
import socket
import subprocess
import sys

import psutil
import pytest

from server.fleet.child import Child
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow  # starts processes

STARTS_ANOTHER = (
    "import subprocess, sys, time; sleep = 'import time; time.sleep(600)';"
    "print(subprocess.Popen([sys.executable, '-c', sleep]).pid, flush=True); time.sleep(600)"
)


def test_a_killed_child_leaves_no_process_that_it_has_started() -> None:
    asyncio.run(kill_a_child())


async def kill_a_child() -> None:
    """Kill a child that has its own child, as vLLM engines have workers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTS_ANOTHER, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    grandchild = psutil.Process(int(await process.stdout.readline()))
    ours, theirs = socket.socketpair()
    theirs.close()
    Child("engine 0", process, ours).kill()
    await process.wait()
    ours.close()
    await asyncio.to_thread(grandchild.wait, PATIENCE)
