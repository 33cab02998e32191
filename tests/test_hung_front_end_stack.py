"""A front end whose event loop stands still is replaced, and says where it stood."""

import threading
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.http import call, completion, fetch
from tests.support.metrics import total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

HANGS = """
import time


async def hangs_when_asked(request, call_next):
    if "hang" in request.query_params:
        time.sleep(1000)
    return await call_next(request)
"""


def test_a_front_end_that_hangs_is_replaced_and_the_others_serve(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(HANGS)
    flags = ("--middleware", f"{file}:hangs_when_asked", "--hang-timeout", "10")
    with RunningStack(*flags, "--data-parallel-size", "1", "--executor", "simulated") as stack:

        def front_ends() -> set[int]:
            return {p.pid for name, p in stack.processes().items() if name.startswith("api")}

        before = front_ends()
        assert len(before) == 2

        def ask() -> None:
            fetch(f"{stack.url}/v1/models?hang=yes")

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: len(front_ends() - before) == 1 and len(front_ends()) == 2, "it is replaced")
        asking.join()
        until(lambda: "in hangs_when_asked" in "\n".join(stack.lines), "the log says where")
        assert len(front_ends() & before) == 1, "the other one serves on"
        assert call(f"{stack.url}/v1/completions", completion("Once", 4))["choices"]
        until(lambda: total(stack.url, "api_server_restarts_total") == 1, "it is counted")
