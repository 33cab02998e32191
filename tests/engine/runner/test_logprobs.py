"""Log probabilities of many rows, however many are computed at once."""

import numpy as np
import pytest
import torch

from engine.runner import logprobs
from engine.runner.logprobs import token_logprobs


@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
def test_logprobs_are_equal_if_computed_in_parts(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocab = 7, 300
    logits = (4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))).bfloat16()
    chosen, alternatives = np.arange(rows) * 40, np.array([0, 5, 1, 20, 0, 300, 2])
    named = [np.empty(0, np.int64)] * rows
    named[4] = np.array([7, 3])
    whole = token_logprobs(logits, chosen, alternatives, named)
    exact = torch.log_softmax(logits.double(), dim=-1)
    for row, entry in enumerate(whole):
        assert entry.logprob == pytest.approx(float(exact[row, chosen[row]]), abs=1e-5)
        assert entry.rank == 1 + int((exact[row] > exact[row, chosen[row]]).sum())
        assert len(entry.top_ids) == (2 if row == 4 else alternatives[row])
    monkeypatch.setattr(logprobs, "_CACHED_VALUES", at_once * vocab)
    assert token_logprobs(logits, chosen, alternatives, named) == whole
