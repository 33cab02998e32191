"""Trains a head to say what its model would: the distribution at every position of an answer."""

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from benchmarks.draft_head.answers import Answered
from benchmarks.draft_head.module import HeadModule

_WARM_UP = 0.05
"""Share of the updates in which the learning rate rises."""
_LAST_RATE = 0.05
"""Share of the highest learning rate that is left at the end."""
_LATER_WEIGHT = 0.8
"""Weight of the loss of each drafted token beside that of the one before it."""
_LARGEST_GRADIENT = 1.0
_SIMILAR = 64
"""Answers among which those of similar lengths make a batch."""


class Vocabulary(NamedTuple):
    """The tokens that a head drafts."""

    token_ids: Tensor
    """[tokens], ascending"""
    lm_head: Tensor
    """[tokens, hidden], the model's for these: it is not trained."""


def frequent_tokens(answers: list[Answered], size: int, count: int) -> Tensor:
    """Return the `count` tokens of a vocabulary that the answers have most often, ascending.

    Among tokens as frequent the first win, which are the most common ones in most tokenizers.
    """
    said = torch.cat([each.token_ids for each in answers]).long()
    times = torch.bincount(said, minlength=size)
    return times.argsort(descending=True, stable=True)[:count].sort().values


class Batch(NamedTuple):
    """Tokens from the second on of some sequences, and what the model computed of them."""

    token_ids: Tensor
    """[sequences, tokens]"""
    tapped: Tensor
    """[sequences, tokens, layers * hidden], of the token before each."""
    final: Tensor
    """[sequences, tokens, hidden]"""
    counts: Tensor
    """[sequences, tokens] whether what is drafted after a token is part of an answer."""


def batch_of(answers: list[Answered]) -> Batch:
    """Put answers side by side, the shorter ones filled with zeros."""

    def side_by_side(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    counts = [torch.arange(2, len(each.token_ids)) >= each.num_prompt_tokens for each in answers]
    return Batch(
        token_ids=side_by_side([each.token_ids[1:-1].long() for each in answers]),
        tapped=side_by_side([each.tapped[:-1].float() for each in answers]),
        final=side_by_side([each.final[1:].float() for each in answers]),
        counts=side_by_side(counts),
    )


def batches(
    answers: list[Answered], tokens: int, source: random.Random
) -> Iterator[list[Answered]]:
    """Yield all answers once, about so many tokens at a time, those of similar lengths together."""
    mixed = [each for each in answers if len(each.token_ids) > 2]
    source.shuffle(mixed)
    groups = list[list[Answered]]()
    for first in range(0, len(mixed), _SIMILAR):
        batch = list[Answered]()
        for each in sorted(mixed[first : first + _SIMILAR], key=lambda each: len(each.token_ids)):
            if batch and (len(batch) + 1) * len(each.token_ids) > tokens:
                groups.append(batch)
                batch = []
            batch.append(each)
        groups.append(batch)
    source.shuffle(groups)
    yield from groups


class Progress(NamedTuple):
    """What one update, or a look at unseen answers, came to."""

    loss: float
    right: list[float]
    """For each drafted token how often the head's likeliest is the model's, given those before."""


class Trainer:
    """A head in training."""

    def __init__(
        self,
        head: HeadModule,
        embedding: Tensor,
        vocabulary: Vocabulary,
        *,
        steps: int,
        updates: int,
        rate: float,
    ) -> None:
        """Train a head in so many updates, `rate` being the highest learning rate.

        `embedding` is the model's, [vocab, hidden]. `steps` tokens are drafted at each position.
        """
        self._head = head
        self._embedding = embedding
        self._vocabulary = vocabulary
        self._steps = steps
        parameters = list(head.weights.values())
        self._optimizer = torch.optim.AdamW(
            parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )

        def schedule(update: int) -> float:
            warm = max(1, int(_WARM_UP * updates))
            if update < warm:
                return (update + 1) / warm
            passed = min(1.0, (update - warm) / max(1, updates - warm))
            return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * passed))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, schedule)

    def update(self, batch: Batch) -> Progress:
        """Learn from a batch."""
        loss, right = self._loss(batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(list(self._head.weights.values()), _LARGEST_GRADIENT)
        self._optimizer.step()
        self._schedule.step()
        return Progress(float(loss.detach()), right)

    @torch.no_grad()
    def look(self, batches: list[Batch]) -> Progress:
        """Return the means over some batches, of which nothing is learned."""
        found = [self._loss(batch) for batch in batches]
        columns = zip(*(right for _, right in found), strict=True)
        return Progress(
            loss=sum(float(loss) for loss, _ in found) / len(found),
            right=[sum(column) / len(column) for column in columns],
        )

    def _loss(self, batch: Batch) -> tuple[Tensor, list[float]]:
        lm_head = self._vocabulary.lm_head
        states = self._head.states(
            F.embedding(batch.token_ids, self._embedding), batch.tapped, self._steps
        )
        with torch.no_grad():
            expected = F.linear(batch.final[batch.counts], lm_head).softmax(dim=-1)
            best = expected.argmax(dim=-1)
        places = torch.arange(batch.counts.shape[1]).expand_as(batch.counts)[batch.counts]
        loss, right = torch.zeros(()), list[float]()
        for step, found in enumerate(states):
            # The first positions of a later step have no step before them.
            chosen = places >= step
            logits = F.linear(found[batch.counts][chosen], lm_head)
            # The model's own entropy is left out of the loss, so that nothing is the best.
            each = F.kl_div(logits.log_softmax(-1), expected[chosen], reduction="batchmean")
            loss = loss + _LATER_WEIGHT**step * each
            agree = (logits.argmax(dim=-1) == best[chosen]).float().mean()
            right.append(float(agree))
        return loss, right
