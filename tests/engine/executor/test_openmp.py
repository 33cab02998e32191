"""The OpenMP runtime of torch's threads, queried in newly started processes."""

import functools
import json
import subprocess
import sys
from typing import Any

from engine.executor.environment import BLOCK_TIME, installed_library
from tests.support.openmp import environment_without_openmp
from tests.support.waiting import PATIENCE

ASK = """
import ctypes, json, os, sys
if sys.argv[2] == "torch first":
    import torch
from engine.executor.environment import configure_environment
if sys.argv[2] == "forked":
    configure_environment(0)
    import torch
    if os.fork():
        os.wait()
        os._exit(0)
configure_environment(0)
configure_environment(0)  # a second time changes nothing
import torch
torch.set_num_threads(3)
torch.ones(1 << 20).sin_()
runtime = ctypes.CDLL(sys.argv[1])
print(json.dumps({
    "pid": os.getpid(),
    "parent": os.getppid(),
    "threads": runtime.omp_get_max_threads(),
    "blocktime": runtime.kmp_get_blocktime(),
    "environment": dict(os.environ),
    "shared memory": os.listdir("/dev/shm"),
}))
"""
"""Loads the runtime itself at last, to ask whether torch's wish for three threads came there."""


@functools.cache
def ask(before: str = "", **variables: str) -> dict[str, Any]:
    library = installed_library()
    assert library is not None, "the package is a dependency of engines on Linux"
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(library), before],
        env={**environment_without_openmp(), **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_torch_uses_llvm_runtime_with_short_spinning() -> None:
    answer = ask()
    assert answer["threads"] == 3
    assert answer["environment"]["KMP_BLOCKTIME"] == BLOCK_TIME
    assert "GOMP_SPINCOUNT" not in answer["environment"]


def test_runtime_leaves_nothing_in_shared_memory() -> None:
    answer = ask()
    assert not [name for name in answer["shared memory"] if f"_{answer['pid']}_" in name]


def test_a_process_that_was_forked_after_torch_was_imported_has_it_too() -> None:
    answer = ask("forked", KMP_BLOCKTIME="7")
    assert answer["threads"] == 3
    assert answer["blocktime"] == 7, "what the operator has said"
    assert not [name for name in answer["shared memory"] if f"_{answer['pid']}_" in name]
    assert not [name for name in answer["shared memory"] if f"_{answer['parent']}_" in name]


def test_torch_keeps_its_own_runtime_once_it_is_imported() -> None:
    answer = ask("torch first")
    assert answer["threads"] != 3
    assert "KMP_BLOCKTIME" not in answer["environment"]
