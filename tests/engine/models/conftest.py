"""Shared fixtures of product and layer tests."""

import pytest


@pytest.fixture
def unpackable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated processor without oneDNN weight packing."""
    from tests.engine.avx2_alone import pack_nothing

    pack_nothing(monkeypatch)
