"""What tests of products and layers share."""

import pytest


@pytest.fixture
def unpackable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor for which oneDNN packs no weights."""
    from tests.engine.avx2_alone import pack_nothing

    pack_nothing(monkeypatch)
