"""Log probabilities of chosen tokens and their alternatives, from raw logits."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.messages import TokenLogprob

IntArray = npt.NDArray[np.int64]


def token_logprobs(logits: Tensor, chosen: IntArray, alternatives: IntArray) -> list[TokenLogprob]:
    """Return one entry per row.

    Args:
        logits: [rows, vocab] as the model gave them, of any floating-point type
        chosen: [rows] the token to report
        alternatives: [rows] how many of the most likely tokens to list

    Equally likely tokens are listed by id, lowest first.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, torch.from_numpy(chosen).to(logits.device).unsqueeze(1))
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    most = min(int(alternatives.max()), logits.shape[1])
    top = _top(logprobs, most)
    top_logprobs = logprobs.gather(1, top).tolist()
    top_ids = top.tolist()
    return [
        TokenLogprob(
            logprob=logprob,
            rank=ranks[row],
            top_ids=top_ids[row][:n],
            top_logprobs=top_logprobs[row][:n],
        )
        for row, (logprob, n) in enumerate(
            zip(own[:, 0].tolist(), alternatives.tolist(), strict=True)
        )
    ]


def _top(values: Tensor, count: int) -> Tensor:
    """Return the ids of the largest values, ties by id.

    `topk` leaves open which of equal values it takes. The keys it sees here are distinct: the bits
    of the float, made to order like an integer, above the id counted downwards.
    """
    bits = values.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits).to(torch.int64)
    vocab = values.shape[1]
    keys = (ordered << 32) | torch.arange(vocab - 1, -1, -1, device=values.device)
    return vocab - 1 - (keys.topk(count, dim=-1).values & 0xFFFF_FFFF)
