"""Small experts give a token the same bits for any number of tokens."""

import torch

from engine.kernels.reference import swiglu
from engine.models.moe import Expert, GroupedExperts
from engine.models.products.dense import DenseLinear
from engine.models.rowwise_experts import RowwiseExperts

EXPERTS, CHOICES, HIDDEN, INNER = 6, 2, 48, 32


def test_token_has_same_bits_in_batches_of_any_size() -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, INNER, HIDDEN, generator=generator)
    experts = RowwiseExperts(gate_up, down, swiglu)
    x = torch.randn(150, HIDDEN, generator=generator)
    scores = torch.randn(150, EXPERTS, generator=generator).softmax(-1)
    weights, chosen = scores.topk(CHOICES)

    def run(first: int, count: int) -> torch.Tensor:
        part = slice(first, first + count)
        out: torch.Tensor = experts(x[part].clone(), chosen[part], weights[part])
        return out

    whole = run(0, 150)
    for first, count in ((0, 1), (149, 1), (7, 3), (20, 4), (31, 5), (40, 30), (60, 64), (9, 65)):
        assert torch.equal(run(first, count), whole[first : first + count]), (first, count)
    plain = GroupedExperts(
        [
            Expert(DenseLinear(up, None), DenseLinear(back.T, None))
            for up, back in zip(gate_up, down, strict=True)
        ]
    )
    torch.testing.assert_close(whole, plain(x, chosen, weights), rtol=1e-4, atol=1e-4)
