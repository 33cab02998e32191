"""What tests of products and layers share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def inference() -> Iterator[None]:
    """The same random numbers in every test, and no gradients."""
    import torch  # quick tests of this package have none

    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def unpackable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor for which oneDNN packs no weights."""
    from tests.engine.avx2_alone import pack_nothing

    pack_nothing(monkeypatch)
