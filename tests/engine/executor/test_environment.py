"""Environment set before torch is imported, without LLVM's OpenMP runtime installed."""

import os

import pytest

from engine.executor.environment import CACHED_PRIMITIVES, SPIN_COUNT, configure_environment

VARIABLES = (
    "GOMP_SPINCOUNT",
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
    monkeypatch.setattr("engine.executor.environment.installed_library", lambda: None)
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
def test_what_the_operator_has_chosen_is_left_alone(
    environment: pytest.MonkeyPatch, name: str, value: str, of: str, expected: str | None
) -> None:
    environment.setenv(name, value)
    assert settled(of) == expected
