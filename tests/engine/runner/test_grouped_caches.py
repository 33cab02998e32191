"""Engines with separate block tables per layer group generate the same output."""

import pytest
from msgspec.structs import replace

from engine.shared.messages import AddRequest
from tests.engine.fixtures import SaveModel
from tests.engine.serving import SOME_TEXT, request, serve


def requests_with_common_beginnings(*, logprobs: int | None = None) -> list[AddRequest]:
    prompt = SOME_TEXT * 2
    return [
        request(
            id, [*prompt[: 20 + 20 * (id % 4)], id], temperature=id % 2 * 0.7, logprobs=logprobs
        )
        for id in range(10)
    ]


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_answers_are_batch_invariant(name: str, checkpoint: SaveModel) -> None:
    """In batches, with cached prefixes and after preemptions, tokens equal a lone run's."""
    directory, requests = checkpoint(name).directory, requests_with_common_beginnings(logprobs=2)
    answers, stats = serve(
        directory, requests, dtype="bfloat16", num_blocks=24, batch_invariant=True
    )
    assert stats.counters.prefix_cache_hits > 0
    assert stats.counters.preemptions > 0
    one_by_one = [replace(sent, exclusive_steps=1000) for sent in requests[::3]]
    alone, stats = serve(
        directory, one_by_one, dtype="bfloat16", batch_invariant=True, enable_prefix_caching=False
    )
    assert alone == answers[::3]
    assert stats.counters.prefix_cache_hits == 0


def test_request_continues_on_another_engine(checkpoint: SaveModel) -> None:
    directory, requests = checkpoint("gemma3").directory, requests_with_common_beginnings()
    whole, _ = serve(directory, requests, dtype="float32")
    for cut in (1, 23, 59):
        moved = [
            replace(sent, output_token_ids=answer.tokens[:cut])
            for sent, answer in zip(requests, whole, strict=True)
        ]
        rest, _ = serve(directory, moved, dtype="float32")
        for answer, end in zip(whole, rest, strict=True):
            assert answer.tokens[:cut] + end.tokens == answer.tokens, cut
