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
