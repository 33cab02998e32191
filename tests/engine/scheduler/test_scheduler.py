"""Plans and outputs of one scheduler, one plan in flight at a time."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.batch.batch import BatchPlan, SlotBlocks, SlotStart
from engine.scheduler.admission import Grant

MakeRig = Callable[..., Any]


def rows(plan: BatchPlan) -> list[tuple[int, int, int, bool]]:
    return list(zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True))


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 1000 for i in range(length)]


def test_request_starts_with_full_prompt_then_single_tokens(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.add(1, prompt(6), max_tokens=3)
    first = rig.step()
    assert first.starting == [SlotStart(0, prompt(6), 6, rig.requests[1].sampling)]
    assert first.blocks == [SlotBlocks(0, 0, [0, 1])]
    assert rows(first) == [(0, 0, 6, True)]
    second = rig.step()
    assert (second.starting, second.blocks) == ([], [])
    assert rows(second) == [(0, 6, 1, True)]
    assert rows(rig.step()) == [(0, 7, 1, True)]
    rig.assert_complete(1)
    rig.assert_idle()


def test_a_decode_gets_a_block_exactly_when_its_last_one_is_full(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(7), max_tokens=4)
    assert [rig.step().blocks for _ in range(4)] == [
        [SlotBlocks(0, 0, [0, 1])],
        [],
        [SlotBlocks(0, 2, [2])],
        [],
    ]
    rig.assert_idle()


def test_long_prompts_are_computed_in_chunks_together_with_decodes(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.add(1, prompt(3), max_tokens=9)
    rig.step()
    rig.add(2, prompt(20, 100), max_tokens=2)
    rig.add(3, prompt(2, 500), max_tokens=2)
    assert rows(rig.step()) == [(0, 3, 1, True), (1, 0, 7, False)]
    assert rig.scheduler.gauges().queued_prefill_tokens == 13 + 2
    assert rows(rig.step()) == [(0, 4, 1, True), (1, 7, 7, False)]
    assert rows(rig.step()) == [(0, 5, 1, True), (2, 0, 1, False), (1, 14, 6, True)]
    assert rows(rig.step()) == [(0, 6, 1, True), (1, 20, 1, True), (2, 1, 1, True)]
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_running_sequences_are_limited_by_slots(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_seqs=2)
    for id in range(5):
        rig.add(id, prompt(3, id), max_tokens=2)
    rig.step()
    assert rig.scheduler.gauges()[:2] == (3, 2)
    rig.step()
    assert [start.slot for start in rig.step().starting] == [1, 0]
    rig.run()
    rig.assert_complete()


def test_requests_start_in_order_of_arrival(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=4, max_num_seqs=4)
    rig.add(1, prompt(8), max_tokens=1)
    rig.add(2, prompt(12, 100), max_tokens=1)  # does not fit beside the first
    rig.add(3, prompt(2, 200), max_tokens=1)  # would, but has to wait its turn
    order = []
    while rig.scheduler.has_work:
        order.append([len(start.token_ids) for start in rig.step().starting])
    assert order == [[8], [12, 2]]


# -- the end of a request -------------------------------------------------------------------------


def test_an_end_of_sequence_token_stops_and_is_reported(make_rig: MakeRig) -> None:
    rig = make_rig(vocab_size=8, eos_token_ids=(0, 5))
    for id in range(20):
        rig.add(id, prompt(3), max_tokens=40)
    rig.run()
    rig.assert_complete()
    stopped = [output for output in rig.last.values() if output.finish_reason == "stop"]
    assert len(stopped) > 10
    assert all(output.stop_token_id == output.token_ids[-1] in (0, 5) for output in stopped)
    rig.assert_idle()


def test_ignore_eos_still_obeys_stop_token_ids(make_rig: MakeRig) -> None:
    rig = make_rig(vocab_size=8, eos_token_ids=(0, 5))
    for id in range(10):
        rig.add(id, prompt(3), max_tokens=40, ignore_eos=True, stop_token_ids=(3,))
    rig.run()
    rig.assert_complete()
    assert {output.stop_token_id for output in rig.last.values()} <= {3, None}


def test_nothing_stops_a_request_before_min_tokens(make_rig: MakeRig) -> None:
    rig = make_rig(vocab_size=4, eos_token_ids=(0, 1))
    for id in range(10):
        rig.add(id, prompt(3, id % 2)[:2], max_tokens=30, min_tokens=12)
    rig.run()
    rig.assert_complete()
    assert all(len(tokens) >= 12 for tokens in rig.tokens.values())


def test_the_model_length_ends_a_request(make_rig: MakeRig) -> None:
    rig = make_rig(max_model_len=10)
    rig.add(1, prompt(7), max_tokens=100)
    rig.run()
    assert rig.last[1].finish_reason == "length"
    assert len(rig.tokens[1]) == 3


def test_a_cache_smaller_than_the_model_length_limits_it(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=3, block_size=4, max_model_len=100)
    assert rig.scheduler.max_model_len == 12
    rig.add(1, prompt(7), max_tokens=100)
    rig.run()
    rig.assert_complete()
    assert len(rig.tokens[1]) == 5


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": prompt(32)}, "at most 31"),
        ({"prompt": [3, 1000]}, "prompt: token ids must be from 0 to 999"),
        ({"prompt": [-1]}, "prompt: token ids"),
        ({"prompt": [1], "output": [1 << 40]}, "output so far: token ids"),
        ({"prompt": [1], "stop_token_ids": (1000,)}, "stop_token_ids: token ids"),
        ({"prompt": [1], "logit_bias": {-3: 1.0}}, "logit_bias: token ids"),
        ({"prompt": [1], "cache_root": b"short"}, "cache_root"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": [1], "top_k": 2**63}, "top_k is"),
        ({"prompt": [1], "min_tokens": -1}, "min_tokens is -1"),
        ({"prompt": [1], "logprobs": 2**40}, "logprobs is"),
        ({"prompt": [1], "prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt": [1], "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": [1], "temperature": -1.0}, "temperature is -1.0: it must be finite and 0"),
        ({"prompt": [1], "top_p": 0.0}, "top_p is 0.0"),
        ({"prompt": [1], "min_p": 1.5}, "min_p is 1.5"),
        ({"prompt": [1], "repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"prompt": [1], "presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"prompt": [1], "frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"prompt": [1], "logit_bias": {3: float("nan")}}, "logit_bias: the bias of token 3"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_a_reason(
    make_rig: MakeRig, arguments: dict[str, Any], error: str
) -> None:
    rig = make_rig(max_model_len=32)
    answer = rig.add(1, **arguments)
    assert answer.finish_reason == "error"
    assert error in answer.error
    rig.assert_idle()


def test_the_longest_prompt_that_fits_runs(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=4, block_size=4, max_model_len=100)
    assert rig.add(1, prompt(15), max_tokens=5) is None
    rig.run()
    assert len(rig.tokens[1]) == 1


def test_duplicate_id_does_not_affect_existing_request(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(5))
    rig.step()
    assert rig.scheduler.add(rig.requests[1]) is None
    rig.run()
    rig.assert_complete()


# -- requests taken over from another engine ------------------------------------------------------


def test_moved_request_continues_after_its_last_token(make_rig: MakeRig) -> None:
    whole = make_rig()
    whole.add(1, prompt(6), max_tokens=10, min_tokens=8)
    whole.run()
    rig = make_rig()
    rig.add(1, prompt(6), output=whole.tokens[1][:4], max_tokens=10, min_tokens=8)
    first = rig.step()
    assert first.starting[0].num_prompt_tokens == 6
    assert rows(first) == [(0, 0, 10, True)]
    rig.run()
    assert whole.tokens[1] == whole.tokens[1][:4] + rig.tokens[1]


def test_moved_request_at_its_limit_is_answered_immediately(make_rig: MakeRig) -> None:
    rig = make_rig()
    answer = rig.add(1, prompt(6), output=[1, 2, 3], max_tokens=3)
    assert (answer.finish_reason, answer.token_ids) == ("length", [])
    rig.assert_idle()


# -- prefix cache ---------------------------------------------------------------------------------


def test_a_repeated_prompt_is_computed_from_its_last_block_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(14), max_tokens=1)
    rig.run()
    rig.add(2, prompt(14), max_tokens=1)
    plan = rig.step()
    assert rows(plan) == [(0, 12, 2, True)]
    assert rig.first[1].num_cached_tokens == 0
    assert rig.first[2].num_cached_tokens == 12
    counters = rig.scheduler.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (28, 12)


def test_generated_tokens_are_cached_for_next_turn(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(6), max_tokens=8)
    rig.run()
    rig.add(2, prompt(6) + rig.tokens[1] + prompt(3, 300), max_tokens=2)
    rig.run()
    rig.assert_complete()
    # The last token of the first turn was drawn and never computed.
    assert rig.first[2].num_cached_tokens == 12


def test_prompt_with_other_root_is_not_cached(make_rig: MakeRig) -> None:
    rig = make_rig()
    shared = list(range(14))
    for id, root in enumerate([b"a" * 16, b"b" * 16, b"", b"a" * 16]):
        rig.add(id, shared, cache_root=root)
        rig.run()
    assert [rig.first[id].num_cached_tokens for id in range(4)] == [0, 0, 0, 12]
    rig.assert_complete()
    rig.assert_idle()


def test_requests_of_one_step_share_no_uncomputed_blocks(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(9), max_tokens=1)
    rig.add(2, prompt(9), max_tokens=1)
    assert rows(rig.step()) == [(0, 0, 9, True), (1, 0, 9, True)]


def test_a_reset_cache_is_empty(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(14), max_tokens=30)
    rig.step()
    assert rig.scheduler.reset_prefix_cache() == 3
    rig.run()
    rig.add(2, prompt(14), max_tokens=1)
    assert rows(rig.step()) == [(0, 0, 14, True)]


def test_prefix_caching_can_be_switched_off(make_rig: MakeRig) -> None:
    rig = make_rig(enable_prefix_caching=False)
    rig.add(1, prompt(14), max_tokens=1)
    rig.run()
    rig.add(2, prompt(14), max_tokens=1)
    assert rows(rig.step()) == [(0, 0, 14, True)]
    assert rig.scheduler.counters.prefix_cache_queries == 0


# -- logprobs -------------------------------------------------------------------------------------


def test_logprobs_come_with_their_tokens(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(4), max_tokens=2, logprobs=3)
    rig.add(2, prompt(4), max_tokens=2)
    rig.schedule()
    with_logprobs, without = rig.update()[0]
    assert [entry.top_ids[0] for entry in with_logprobs.logprobs] == with_logprobs.token_ids
    assert len(with_logprobs.logprobs[0].top_ids) == 3
    assert without.logprobs is None


def test_prompt_logprobs_are_complete_in_spite_of_chunks_and_cached_prefixes(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_num_batched_tokens=7)
    rig.add(1, prompt(20), max_tokens=1)
    rig.run()
    rig.add(2, prompt(20), max_tokens=2, prompt_logprobs=1)
    rig.run()
    assert [entry.top_ids for entry in rig.first[2].prompt_logprobs] == [
        [t] for t in prompt(20)[1:]
    ]
    assert rig.first[2].num_cached_tokens == 0
    assert rig.last[2].prompt_logprobs is None
    assert rig.scheduler.counters.prefix_cache_queries == 20


def test_prompt_logprobs_survive_a_preemption(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=8, max_num_batched_tokens=8, max_model_len=30)
    rig.add(1, prompt(8), max_tokens=20)
    rig.step()
    rig.add(2, prompt(20, 100), max_tokens=2, prompt_logprobs=1)
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    rig.assert_complete()
    expected = [[t] for t in prompt(20, 100)[1:]]
    assert [entry.top_ids for entry in rig.first[2].prompt_logprobs] == expected


# -- preemption -----------------------------------------------------------------------------------


def test_last_admitted_request_is_preempted_first(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=4, max_model_len=16, enable_prefix_caching=False)
    rig.add(1, prompt(7), max_tokens=6)
    rig.add(2, prompt(6, 100), max_tokens=6)
    rig.add(3, prompt(1, 200), max_tokens=1)
    starts = rig.step().starting
    assert [len(start.token_ids) for start in starts] == [7, 6]  # both take two blocks
    rig.step()
    plan = rig.step()  # the first needs a third block
    assert rows(plan) == [(0, 8, 1, True)]
    assert rig.scheduler.gauges()[:2] == (2, 1)
    assert rig.scheduler.counters.preemptions == 1
    assert rig.scheduler.gauges().queued_prefill_tokens == 8 + 1
    starts = []
    while rig.scheduler.has_work:
        starts += rig.step().starting
    assert [len(start.token_ids) for start in starts] == [8, 1], "it starts before those that wait"
    assert starts[0].token_ids == prompt(6, 100) + rig.tokens[2][:2]
    assert starts[0].num_prompt_tokens == 6
    rig.assert_complete()
    rig.assert_idle()


def test_a_preempted_request_finds_its_blocks_in_the_cache(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=6, max_model_len=24)
    rig.add(1, prompt(11), max_tokens=3)
    rig.add(2, prompt(11, 100), max_tokens=6)
    restarted = []
    while rig.scheduler.has_work:
        plan = rig.step()
        restarted += [row for row in rows(plan) if row[1] > 0 and row[2] > 1]
    assert rig.scheduler.counters.preemptions == 1
    assert restarted == [(0, 8, 5, True)]  # only the third block was overwritten
    rig.assert_complete()
    assert rig.first[2].num_cached_tokens == 0


def test_admission_leaves_headroom_for_running_requests(make_rig: MakeRig) -> None:
    rig = make_rig(num_kv_blocks=200, max_model_len=800, max_num_batched_tokens=1000)
    rig.add(1, prompt(399), max_tokens=8)
    rig.add(2, prompt(396, 1), max_tokens=2)
    assert len(rig.step().slots) == 1  # 100 + 99 blocks would leave one, two have to be left
    rig.run()
    assert rig.scheduler.counters.preemptions == 0


# -- grants ---------------------------------------------------------------------------------------


def test_a_hold_stops_prefills_and_lets_decodes_run(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=8)
    rig.add(1, prompt(3), max_tokens=9)
    rig.add(2, prompt(20, 100), max_tokens=2)
    rig.step()
    rig.add(3, prompt(2, 200))
    assert rows(rig.step(Grant(token_cap=0))) == [(0, 3, 1, True)]
    assert rows(rig.step(Grant(admit_new=False))) == [(0, 4, 1, True), (1, 5, 7, False)]
    only_new = Grant(run_partials=False)
    assert rows(rig.step(only_new)) == [(0, 5, 1, True), (2, 0, 2, True)]
    capped = Grant(token_cap=4)
    assert rows(rig.step(capped)) == [(0, 6, 1, True), (2, 2, 1, True), (1, 12, 4, False)]
    rig.run()
    rig.assert_complete()


def test_step_without_allowed_work_is_empty(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, prompt(3))
    assert rows(rig.step(Grant(token_cap=0))) == []
    rig.run()
    rig.assert_complete()


# -- abort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("in_flight", [False, True])
def test_abort_at_any_point_frees_everything_without_side_effects(
    make_rig: MakeRig, steps: int, in_flight: bool
) -> None:
    rig = make_rig(max_num_batched_tokens=8, num_kv_blocks=10, max_model_len=40)
    rig.add(1, prompt(20), max_tokens=5)
    rig.add(2, prompt(9, 100), max_tokens=5)
    for _ in range(steps):
        rig.step()
    if in_flight:
        rig.schedule()
    seen = list(rig.tokens[1])
    rig.scheduler.abort([1, 77])
    rig.scheduler.check_integrity()
    if in_flight:
        rig.update()
    if 1 not in rig.last:
        assert rig.tokens[1] == seen
    rig.run()
    rig.assert_complete(2)
    rig.assert_idle()


def test_the_blocks_of_an_aborted_request_are_not_reused_while_a_step_writes_them(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(num_kv_blocks=4, max_model_len=16)
    rig.add(1, prompt(12), max_tokens=3)
    rig.schedule()
    rig.scheduler.abort([1])
    rig.add(2, prompt(12, 100), max_tokens=3)
    assert rig.scheduler.gauges().kv_usage == 0.75
    assert rows(rig.schedule()) == []
    rig.update()
    assert rig.scheduler.gauges().kv_usage == 0
    rig.update()
    rig.run()
    rig.assert_complete(2)


# -- for the log ----------------------------------------------------------------------------------


def test_plan_description_contains_no_tokens(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1, [912, 934, 956, 978, 991])
    rig.schedule()
    text = rig.scheduler.describe_in_flight()
    assert "1 (request-1): slot 0, start 0, count 5, 6 tokens, 2 blocks" in text
    assert not any(str(token) in text for token in rig.requests[1].prompt_token_ids)


# -- long prompts ---------------------------------------------------------------------------------


def test_long_prefill_threshold_leaves_budget_for_others(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    rig.add(1, prompt(20), max_tokens=2)
    rig.add(2, prompt(3, 100), max_tokens=2)
    rig.add(3, prompt(9, 200), max_tokens=2)
    assert rows(rig.step()) == [(2, 0, 1, False), (0, 0, 8, False), (1, 0, 3, True)]
    assert rows(rig.step()) == [(1, 3, 1, True), (0, 8, 8, False), (2, 1, 3, False)]
    assert rows(rig.step()) == [(0, 16, 4, True), (2, 4, 5, True)]
    rig.run()
    rig.assert_complete()


def test_all_requests_can_be_preempted_and_resume_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=12)
    rig.add(1, prompt(9), max_tokens=5)
    rig.add(2, prompt(9, 100), max_tokens=5)
    rig.step()
    rig.add(3, prompt(9, 200), max_tokens=5)
    rig.scheduler.preempt_all()
    assert rig.scheduler.gauges() == (3, 0, 0.0, 10 + 9 + 9)
    starts = [start.token_ids[0] for _ in range(3) for start in rig.step().starting]
    assert starts == [0, 100, 200]
    rig.run()
    rig.assert_complete()
    rig.assert_idle()
