"""Draft tokens in plans: they save steps and change nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.batch.executor import ExecutorInfo
from engine.executor.simulated import simulated_token
from engine.scheduler.draft_lengths import Prices
from engine.scheduler.speculation import draft_prices, lookup_lengths
from engine.shared.config import SchedulerConfig

MakeRig = Callable[..., Any]

SEED = 1


def drawn_after(length: int, last: int, count: int) -> list[int]:
    """Return what the simulated model draws after a sequence of this length and end."""
    tokens = [last]
    for position in range(length, length + count):
        tokens.append(simulated_token(SEED, position, tokens[-1], 1000))
    return tokens[1:]


def foretold(length: int, right: int, wrong: int = 0) -> list[int]:
    """Return a prompt that says what will be drawn after its end, then something else.

    The first token is drawn by the prefill; after it come `right` tokens that can be drafted.
    """
    start = [1, 2, *drawn_after(length, 2, 1 + right), *[3] * wrong]
    filler = [500 + i for i in range(length - len(start) - 2)]
    return [*start, *filler, 1, 2]


def test_accepted_drafts_save_steps(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=4)
    rig.add(SEED, foretold(20, right=4), max_tokens=6)
    rig.step()
    plan = rig.schedule()
    assert plan.proposed == {0: drawn_after(20, 2, 5)[1:]}
    assert (plan.starts, plan.counts) == ([20], [5])
    (output,) = rig.update()[0]
    assert output.token_ids == drawn_after(20, 2, 6)[1:]
    assert output.finish_reason == "length"
    rig.assert_complete()
    rig.assert_idle()
    counters = rig.scheduler.counters
    assert (counters.spec_drafts, counters.spec_draft_tokens) == (1, 4)
    assert counters.spec_accepted_tokens == 4
    assert counters.spec_accepted_at == [1, 1, 1, 1]
    assert counters.generation_tokens == 6


def test_tokens_after_rejected_draft_are_recomputed(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=4)
    rig.add(SEED, foretold(20, right=2, wrong=2), max_tokens=9)
    rig.step()
    rig.schedule()
    (output,) = rig.update()[0]
    assert output.token_ids == drawn_after(20, 2, 4)[1:]
    assert rig.scheduler.counters.spec_accepted_tokens == 2
    assert rig.scheduler.counters.spec_accepted_at == [1, 1]
    plan = rig.schedule()
    assert (plan.starts, plan.counts) == ([23], [1])
    rig.update()
    rig.run()
    rig.assert_complete()


def test_blocks_with_rejected_drafts_are_not_cached(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=4)
    rig.add(SEED, foretold(20, right=2, wrong=2), max_tokens=9)
    rig.step()
    rig.step()  # positions 20 to 24 are written, those from 23 on with wrong tokens
    rig.scheduler.abort([SEED])
    known = rig.requests[SEED].prompt_token_ids + rig.tokens[SEED]
    assert len(known) == 24
    rig.add(2, [*known, 9], max_tokens=3)
    rig.run()
    assert rig.first[2].num_cached_tokens == 20
    rig.assert_complete(2)


def test_end_token_among_accepted_drafts_ends_request(make_rig: MakeRig) -> None:
    tokens = drawn_after(20, 2, 6)
    for stop, reason in ((tokens[2], "stop"), (0, "length")):
        rig = make_rig(speculative_ngram=4)
        rig.add(SEED, foretold(20, right=4), max_tokens=4, stop_token_ids=(stop,), logprobs=0)
        rig.run()
        rig.assert_complete()
        rig.assert_idle()
        assert rig.last[SEED].finish_reason == reason


def test_nothing_is_drafted_beyond_a_token_that_ends_the_request(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=4)
    tokens = drawn_after(20, 2, 6)
    rig.add(SEED, foretold(20, right=4), max_tokens=9, stop_token_ids=(tokens[2],))
    rig.step()
    assert rig.schedule().proposed == {0: tokens[1:3]}


@pytest.mark.parametrize(("budget", "drafted"), [(24, 4), (6, 4), (4, 2), (2, 0)])
def test_drafts_get_remaining_budget(make_rig: MakeRig, budget: int, drafted: int) -> None:
    rig = make_rig(speculative_ngram=4, max_num_batched_tokens=budget)
    rig.add(SEED, foretold(20, right=4), max_tokens=9)
    rig.add(2, [9, 8], max_tokens=9)
    while rig.scheduler.gauges().waiting or rig.scheduler.gauges().queued_prefill_tokens:
        rig.step()
    plan = rig.schedule()
    assert plan.num_tokens <= budget
    assert sum(map(len, plan.proposed.values())) == drafted
    rig.update()


def test_prefill_precedes_drafts(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=4, max_num_batched_tokens=24)
    rig.add(SEED, foretold(20, right=4), max_tokens=9)
    rig.step()
    rig.add(2, list(range(100, 122)), max_tokens=2)
    plan = rig.step()
    assert sorted(plan.counts) == [2, 22]
    assert list(plan.proposed.values()) == [drawn_after(20, 2, 2)[1:]]
    rig.run()
    rig.assert_complete()


def test_drafts_take_only_blocks_that_are_free(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=6, num_kv_blocks=8, max_model_len=32)
    rig.add(SEED, foretold(20, right=6), max_tokens=8)
    rig.add(2, [9, 8, 7, 6, 5, 4], max_tokens=8)
    rig.step()
    plan = rig.step()
    assert list(plan.proposed.values()) == [drawn_after(20, 2, 4)[1:]]  # up to position 23
    assert rig.scheduler.counters.preemptions == 0
    rig.run()
    rig.assert_complete()


def test_poor_acceptance_shortens_drafts(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=8, vocab_size=2, max_model_len=128)
    rig.add(SEED, [0, 1] * 10, max_tokens=100)
    lengths = []
    while rig.scheduler.has_work:
        proposed = rig.step().proposed
        lengths += [len(tokens) for tokens in proposed.values()]
    assert lengths[0] == 8
    assert min(lengths) < 4
    rig.assert_complete()


def misled(length: int, count: int, seed: int) -> list[int]:
    """Return a prompt in which something else follows each of the next `count` tokens."""
    drawn = [2]
    for position in range(length, length + count):
        drawn.append(simulated_token(seed, position, drawn[-1], 1000))
    pairs = [token for each in drawn[1:] for token in (each, 3)]
    return [*pairs, *[4] * (length - len(pairs) - 1), 2]


def test_drafting_stops_only_for_unpredictable_sequences(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(
        speculative_ngram=4,
        speculative_row_price=0.2,
        prompt_lookup_min=1,
        num_kv_blocks=400,
        max_num_batched_tokens=1024,
        max_model_len=512,
    )
    rig.add(SEED, foretold(160, right=130), max_tokens=130)
    rig.add(2, misled(160, 60, 2), max_tokens=50)
    drafted: dict[int, list[int]] = {0: [], 1: []}
    while rig.scheduler.gauges().running + rig.scheduler.gauges().waiting == 2:
        plan = rig.step()
        for slot in drafted:
            row = plan.slots.index(slot) if slot in plan.slots else -1
            drafted[slot].append(len(plan.proposed.get(row, ())))
    predictable, unpredictable = drafted[0][2:], drafted[1][10:]
    assert predictable.count(4) > 0.8 * len(predictable) > 10
    assert sum(unpredictable) <= len(unpredictable) / 3
    assert rig.scheduler.counters.spec_skipped > len(unpredictable) / 2
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_no_drafts_in_batches_beyond_configured_size(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(speculative_ngram=4, speculative_disable_by_batch_size=1)
    rig.add(SEED, foretold(20, right=4), max_tokens=9)
    rig.add(2, [9, 8, 7], max_tokens=3)
    rig.step()
    assert not rig.step().proposed
    assert rig.scheduler.counters.spec_skipped == 1
    rig.step()
    assert rig.step().proposed
    rig.run()
    rig.assert_complete()


def test_a_request_waits_for_its_drafts_when_plans_overlap(make_rig: MakeRig) -> None:
    rig = make_rig(speculative_ngram=4)
    rig.add(SEED, foretold(20, right=4), max_tokens=12)
    rig.step()
    assert rig.schedule().proposed
    assert rig.schedule().slots == []
    rig.update()
    rig.run(depth=2)
    rig.assert_complete()


@pytest.mark.parametrize(
    ("given", "lengths"),
    [((None, None), (2, 4)), ((6, None), (6, 6)), ((None, 1), (1, 1)), ((3, 5), (3, 5))],
)
def test_one_lookup_length_adjusts_default_of_the_other(
    given: tuple[int | None, int | None], lengths: tuple[int, int]
) -> None:
    shortest, longest = given
    config = SchedulerConfig(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    assert lookup_lengths(config) == lengths


@pytest.mark.parametrize(
    ("given", "prices"),
    [(None, Prices(0.1, 0.3)), (0.4, Prices(0.4, 0.3)), (0.0, Prices(0.0))],
)
def test_row_price_is_from_executor_unless_configured(given: float | None, prices: Prices) -> None:
    executor = ExecutorInfo(9, 9, 9, (), "", row_price=0.1, draft_price=0.3)
    assert draft_prices(SchedulerConfig(speculative_row_price=given), executor) == prices
