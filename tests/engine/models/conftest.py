"""What tests of products and layers share."""

from collections.abc import Iterator
from typing import Any, NoReturn

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
    from engine.models.products import dense

    def cannot_pack(*_: Any) -> NoReturn:
        raise RuntimeError("bf16 path needs the cpu support avx512")

    monkeypatch.setattr(dense, "_packable", {})
    monkeypatch.setattr(dense, "PackedLinear", cannot_pack)
