"""Whether idle compute threads leave the processor to others."""

import os

import pytest

from engine.executor.spinning import SPIN_COUNT, limit_spinning


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def spin_count():
    limit_spinning()
    return os.environ.get("GOMP_SPINCOUNT")


def test_spinning_is_limited_by_default():
    assert spin_count() == str(SPIN_COUNT)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("GOMP_SPINCOUNT", "7", "7"), ("OMP_WAIT_POLICY", "ACTIVE", None)],
)
def test_what_the_operator_has_chosen_is_left_alone(environment, name, value, expected):
    environment.setenv(name, value)
    assert spin_count() == expected
