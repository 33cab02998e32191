"""What tests of products and layers share."""

import pytest
import torch


@pytest.fixture
def inference():
    """The same random numbers in every test, and no gradients."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
