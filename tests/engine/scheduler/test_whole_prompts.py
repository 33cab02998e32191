"""Prompts computed in one step each, with chunked prefill disabled."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.scheduler.admission import Grant
from engine.shared.config import SchedulerConfig
from tests.engine.scheduler.test_images import VISION, add, encoded, image

MakeRig = Callable[..., Any]


@pytest.fixture
def make_whole(make_rig: MakeRig) -> MakeRig:
    def make(**changes: Any) -> Any:
        sizes = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_slowdown": 0}
        return make_rig(**{**sizes, "enable_chunked_prefill": False, **changes})

    return make


def test_whole_prompt_waits_for_a_step_and_is_not_overtaken(
    make_whole: MakeRig,
) -> None:
    rig = make_whole()
    rig.add(1, range(30))
    rig.add(2, range(40, 75))
    rig.add(3, range(80, 90))
    assert [rig.step().counts for _ in range(2)] == [[30], [1, 35, 10]]
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_cached_tokens_need_no_budget(make_whole: MakeRig) -> None:
    rig = make_whole()
    rig.add(1, range(40), max_tokens=1)
    rig.run()
    rig.add(2, range(90, 140))
    rig.add(3, [*range(40), 7, 8])
    assert rig.step().counts == [50, 2]
    rig.run()
    rig.assert_complete()


def test_a_preempted_request_is_computed_again_with_its_tokens_in_one_step(
    make_whole: MakeRig,
) -> None:
    rig = make_whole(enable_prefix_caching=False)
    rig.add(1, range(50), max_tokens=10)
    rig.add(2, range(12), max_tokens=10)
    for _ in range(5):
        rig.step()
    rig.scheduler.preempt_all()
    assert rig.step().counts == [50 + 5]
    assert rig.step().counts == [1, 12 + 5]
    rig.run()
    rig.assert_complete()


def test_grant_delays_prompts_without_splitting(make_whole: MakeRig) -> None:
    rig = make_whole()
    rig.add(1, range(5), max_tokens=20)
    rig.step()
    rig.add(2, range(100, 130))
    rig.add(3, range(200, 220))
    assert rig.step(Grant(token_cap=0)).counts == [1]
    assert rig.step(Grant(token_cap=10)).counts == [1, 30]
    assert rig.step(Grant(token_cap=25)).counts == [1, 1, 20]
    rig.run()
    rig.assert_complete()


def test_policy_sees_prompts_that_fit_the_step(make_whole: MakeRig) -> None:
    rig = make_whole()
    rig.add(1, range(40))
    rig.add(2, range(100, 130))
    state = rig.scheduler.rank_state()
    assert (state.ready_prefill_tokens, state.ready_prefills) == (40, 1)


def test_tenants_share_steps_without_splitting_prompts(make_whole: MakeRig) -> None:
    rig = make_whole(max_slowdown=1.25, max_num_seqs=4, num_kv_blocks=200)
    for id in range(20):
        rig.add(id, range(40), tenant=1)
    rig.add(99, range(40), tenant=2)
    order: list[int] = []
    while 99 not in rig.last:
        rig.step()
        order = list(rig.last)
    assert len(order) < 10
    rig.run()
    rig.assert_complete()


def test_all_images_of_a_prompt_are_encoded_in_its_step(make_whole: MakeRig) -> None:
    rig = make_whole(vision=VISION, max_num_batched_tokens=72, encoder_cache_bytes=64 << 10)
    add(rig, 1, 2, image(1, 0), image(2, 0), 1)
    add(rig, 2, 1, image(3, 0), image(4, 0), 1)
    plans = [rig.step() for _ in range(2)]
    assert [encoded(plan) for plan in plans] == [[1, 2, 3, 4], []]
    add(rig, 3, 1, image(5, 0), image(6, 0), image(7, 0), 1)
    assert encoded(rig.step()) == [5, 6, 7]
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_num_batched_tokens": 63}, "--max-num-batched-tokens is 63"),
        (
            {"vision": VISION, "encoder_cache_bytes": 64 * 1024 - 1},
            "--encoder-cache-bytes is 65535",
        ),
    ],
)
def test_a_step_that_would_not_hold_the_longest_prompt_is_refused(
    make_whole: MakeRig, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make_whole(**changes)


@pytest.mark.parametrize("setting", ["long_prefill_token_threshold", "max_num_encoder_tokens"])
def test_settings_that_divide_prompts_are_refused(setting: str) -> None:
    given: dict[str, Any] = {setting: 8}
    with pytest.raises(ValueError, match=f"{setting} divides prompts"):
        SchedulerConfig(enable_chunked_prefill=False, **given)
