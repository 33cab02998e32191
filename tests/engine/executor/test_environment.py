"""Environment set before torch is imported, with and without LLVM's OpenMP runtime."""

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.executor import environment as module
from engine.executor.environment import (
    BLOCK_TIME,
    CACHED_PRIMITIVES,
    SPIN_COUNT,
    configure_environment,
)

VARIABLES = (
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "KMP_HOT_TEAMS_MODE",
    "LD_PRELOAD",
    "OMP_WAIT_POLICY",
    "LRU_CACHE_CAPACITY",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "THP_MEM_ALLOC_ENABLE",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(module, "installed_library", lambda: None)
    return monkeypatch


def settled(name: str) -> str | None:
    configure_environment()
    return os.environ.get(name)


def test_large_tensors_are_in_huge_pages_by_default() -> None:
    assert settled("THP_MEM_ALLOC_ENABLE") == "1"


def test_spinning_and_caches_are_limited_by_default() -> None:
    assert settled("GOMP_SPINCOUNT") == str(SPIN_COUNT)
    assert settled("LRU_CACHE_CAPACITY") == str(CACHED_PRIMITIVES)
    assert settled("ONEDNN_PRIMITIVE_CACHE_CAPACITY") == str(CACHED_PRIMITIVES)


@pytest.mark.parametrize(
    ("name", "value", "of", "expected"),
    [
        ("GOMP_SPINCOUNT", "7", "GOMP_SPINCOUNT", "7"),
        ("OMP_WAIT_POLICY", "ACTIVE", "GOMP_SPINCOUNT", None),
        ("LRU_CACHE_CAPACITY", "512", "LRU_CACHE_CAPACITY", "512"),
        ("THP_MEM_ALLOC_ENABLE", "0", "THP_MEM_ALLOC_ENABLE", "0"),
    ],
)
def test_operator_environment_is_not_changed(
    environment: pytest.MonkeyPatch, name: str, value: str, of: str, expected: str | None
) -> None:
    environment.setenv(name, value)
    assert settled(of) == expected


@pytest.fixture
def loaded(environment: pytest.MonkeyPatch) -> list[str]:
    """The libraries that were loaded, where LLVM's is installed and torch not imported yet."""
    names: list[str] = []

    def load(name: str, **_: Any) -> Any:
        names.append(name)
        return SimpleNamespace(omp_get_max_threads=lambda: 4)

    environment.setattr(module, "_loaded", [])
    environment.setattr(module, "installed_library", lambda: Path("libomp.so"))
    environment.setattr(module, "num_cores", lambda: 4)
    environment.setattr(ctypes, "CDLL", load)
    environment.delitem(sys.modules, "torch", raising=False)
    return names


@pytest.mark.parametrize(
    ("variables", "block_time"),
    [({}, BLOCK_TIME), ({"KMP_BLOCKTIME": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=str,
)
def test_llvm_runtime_spins_briefly_unless_configured(
    environment: pytest.MonkeyPatch,
    loaded: list[str],
    variables: dict[str, str],
    block_time: str | None,
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert settled("KMP_BLOCKTIME") == block_time
    assert loaded == ["libomp.so"]
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("variables", "processes"),
    [({"GOMP_SPINCOUNT": "100"}, 1), ({"LD_PRELOAD": "libiomp5.so"}, 1), ({}, 4)],
    ids=["settings of libgomp", "another runtime", "one core for each process"],
)
def test_torch_keeps_its_own_runtime(
    environment: pytest.MonkeyPatch, loaded: list[str], variables: dict[str, str], processes: int
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    configure_environment(processes)
    assert not loaded
    assert "KMP_BLOCKTIME" not in os.environ
    assert os.environ["GOMP_SPINCOUNT"] == variables.get("GOMP_SPINCOUNT", str(SPIN_COUNT))
