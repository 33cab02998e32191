"""The training example: what is served is what was trained."""

import pytest
import torch

from benchmarks.policy_gradient import KEY, gains_of, train
from benchmarks.running_stack import RunningStack


def test_advantage_of_token_is_return_from_it_minus_mean() -> None:
    gains = gains_of(torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    assert torch.allclose(gains.sum(0), torch.zeros(3))
    first = gains[0] / gains[0, 2]
    assert torch.allclose(first, torch.tensor([2.0, 2.0, 1.0]))


@pytest.mark.stack
@pytest.mark.slow
def test_each_step_samples_from_newest_policy() -> None:
    flags = ("--admin-key", KEY, "--data-parallel-size", "2", "--num-kv-blocks", "512")
    with RunningStack(*flags) as stack:
        steps = list(train(stack.url, 2, 1e-3))
    versions = [each.weight_version for each in steps]
    assert versions == ["(checkpoint)", "step-1", "step-2"]
    # Keys and values in bfloat16 make 0.01; weights that were one step older would make 0.7.
    assert all(each.logprob_error < 0.05 for each in steps)
