"""Engines whose layers have block tables of their own: what their requests get does not show it."""

import pytest

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
    """Beside others, behind cached prefixes and after preemptions they are those of one alone."""
    directory, requests = checkpoint(name).directory, requests_with_common_beginnings(logprobs=2)
    answers, stats = serve(
        directory, requests, dtype="bfloat16", num_blocks=24, batch_invariant=True
    )
    assert stats.counters.prefix_cache_hits > 0
    assert stats.counters.preemptions > 0
    for sent, answer in list(zip(requests, answers, strict=True))[::3]:
        alone, _ = serve(directory, [sent], dtype="bfloat16", batch_invariant=True)
        assert alone[0] == answer


@pytest.mark.parametrize("cut", [1, 23, 59])
def test_a_request_goes_on_in_another_engine(cut: int, checkpoint: SaveModel) -> None:
    directory, requests = checkpoint("gemma3").directory, requests_with_common_beginnings()
    whole, _ = serve(directory, requests, dtype="float32")
    moved = [
        AddRequest(
            sent.id, sent.request_id, 0, 0, sent.prompt_token_ids, sent.sampling,
            output_token_ids=answer.tokens[:cut],
        )
        for sent, answer in zip(requests, whole, strict=True)
    ]  # fmt: skip
    rest, _ = serve(directory, moved, dtype="float32")
    for answer, end in zip(whole, rest, strict=True):
        assert answer.tokens[:cut] + end.tokens == answer.tokens
