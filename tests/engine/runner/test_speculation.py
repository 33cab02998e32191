"""Draft tokens do not change a model's output, for any request parameters."""

from typing import Any

from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import AddRequest
from tests.engine.serving import PARAMETERS, SOME_TEXT, assert_alike, every_kind, request, serve

FEW_BLOCKS = 40
"""So few that requests are preempted."""


def test_answers_equal_those_without_drafts() -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": FEW_BLOCKS}
    plain, before = serve(BUNDLED_MODEL, every_kind(), **options)
    drafted, after = serve(BUNDLED_MODEL, every_kind(), speculative_ngram=5, **options)
    assert_alike(plain, drafted)
    for name, answer in zip(PARAMETERS, plain, strict=True):
        assert len(answer.logprobs) == (len(answer.tokens) if "scored" in name else 0)
    assert before.counters.spec_drafts == 0
    assert after.counters.spec_accepted_tokens > 50
    assert after.counters.spec_draft_tokens > after.counters.spec_accepted_tokens
    assert after.step < before.step
    assert after.counters.preemptions > 0


def test_answers_are_the_same_where_only_some_are_drafted_for() -> None:
    """A single possible token is easy to predict; four equally likely ones are not."""
    allowed = {id: (70,) if id % 2 else (60, 61, 62, 63) for id in range(8)}
    requests = [
        request(id, SOME_TEXT[: 11 + 2 * id], temperature=50.0, allowed_token_ids=tokens)
        for id, tokens in allowed.items()
    ]
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": FEW_BLOCKS}
    plain, _ = serve(BUNDLED_MODEL, requests, **options)
    options |= {"speculative_ngram": 4, "speculative_row_price": 0.1, "max_slowdown": 0}
    drafted, after = serve(BUNDLED_MODEL, requests, **options)
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in drafted]
    counters = after.counters
    assert counters.spec_skipped > 30
    assert counters.spec_accepted_tokens > 0.5 * counters.spec_draft_tokens > 50
    assert counters.preemptions > 0


def test_moved_request_continues_with_same_tokens() -> None:
    prompt = SOME_TEXT[:20] * 2
    (whole,), _ = serve(BUNDLED_MODEL, [request(3, prompt)], dtype="float32", speculative_ngram=4)
    taken_over = request(3, prompt)
    taken_over = AddRequest(
        3, "3", 0, 0, prompt, taken_over.sampling, output_token_ids=whole.tokens[:23]
    )
    (rest,), _ = serve(BUNDLED_MODEL, [taken_over], dtype="float32", speculative_ngram=4)
    assert whole.tokens[:23] + rest.tokens == whole.tokens


def test_batch_invariant_16_bit_answers_equal_those_without_drafts() -> None:
    requests = [
        request(id, SOME_TEXT[: 9 + 3 * id] * 2, temperature=id % 2 * 0.7) for id in range(8)
    ]
    options: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    plain, _ = serve(BUNDLED_MODEL, requests, **options)
    drafted, stats = serve(BUNDLED_MODEL, requests, speculative_ngram=8, **options)
    assert [answer.tokens for answer in plain] == [answer.tokens for answer in drafted]
    assert stats.counters.spec_accepted_tokens > 50
