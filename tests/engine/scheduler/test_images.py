"""Images in prompts: encoded within a budget, cached, and distinguished."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from engine.models.spec import SiglipSpec, TowerSpec
from engine.scheduler.refusal import bad_images
from engine.shared.messages import AddRequest, EncoderInput, SamplingParams

MakeRig = Callable[..., Any]
VISION = SiglipSpec(
    token_id=999,
    image_size=8,
    patch_size=1,
    scale_factor=2,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    activation="gelu",
    eps=1e-6,
)
"""An image of 8 x 8 is 16 tokens, one of 4 x 4 is 4."""


def image(number: int, position: int, side: int = 8) -> EncoderInput:
    digest = number.to_bytes(16, "little")
    tokens = VISION.num_tokens(side, side)
    return EncoderInput(position, tokens, digest, side, side, bytes([number]) * (3 * side * side))


def prompt(*parts: int | EncoderInput) -> tuple[list[int], list[EncoderInput]]:
    """Return a prompt of as many tokens of text as the numbers say, and the images between."""
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, EncoderInput):
            images.append(replace(part, position=len(tokens)))
            tokens += [VISION.token_id] * part.num_tokens
        else:
            tokens += range(part)
    return tokens, images


def add(rig: Any, id: int, *parts: int | EncoderInput, **sampling: Any) -> None:
    tokens, images = prompt(*parts)
    assert rig.add(id, tokens, images=images, **sampling) is None


def encoded(plan: Any) -> list[int]:
    return [each.digest[0] for each in plan.encoded]


def counts(rig: Any) -> tuple[int, int, int]:
    counters = rig.scheduler.counters
    return counters.encoder_cache_queries, counters.encoder_cache_hits, counters.encoded_images


@pytest.fixture
def rig(make_rig: MakeRig) -> Any:
    return make_rig(vision=VISION)


def test_an_image_is_encoded_with_the_step_that_computes_its_first_token(rig: Any) -> None:
    add(rig, 1, 5, image(1, 0), 3)
    plan = rig.step()
    assert (plan.counts, encoded(plan)) == ([24], [1])
    (start,) = plan.starting
    assert [(each.position, each.num_tokens) for each in start.images] == [(5, 16)]
    assert encoded(rig.step()) == []
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_a_step_stops_before_an_image_that_it_cannot_encode(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, max_num_encoder_tokens=16)
    add(rig, 1, 5, image(1, 0), 2, image(2, 0), image(3, 0), 1)
    plans = [rig.step() for _ in range(3)]
    assert [plan.counts for plan in plans] == [[23], [16], [17]]
    assert [encoded(plan) for plan in plans] == [[1], [2], [3]]
    rig.run()
    rig.assert_complete()


def test_the_budget_is_enough_for_the_largest_image(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, max_num_encoder_tokens=1, encoder_cache_bytes=1)
    add(rig, 1, image(1, 0), image(2, 0), 1)
    plans = [rig.step(), rig.step()]
    assert [plan.counts for plan in plans] == [[16], [17]]
    assert [plan.evicted_images for plan in plans] == [[], [image(1, 0).digest]]
    rig.run()
    rig.assert_complete()


def test_image_larger_than_budget_has_its_own_step(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, max_num_encoder_tokens=8)
    small = [image(number, 0, side=4) for number in (1, 2, 4, 5, 6)]
    add(rig, 1, *small[:2], image(3, 0), *small[2:], 1)
    plans = [rig.step() for _ in range(4)]
    assert [encoded(plan) for plan in plans] == [[1, 2], [3], [4, 5], [6]]
    rig.run()
    rig.assert_complete()


WHOLE = replace(VISION, is_gemma=True)
"""Of a model whose tokens of images see all of their image."""


def steps_of(rig: Any, number: int) -> list[tuple[list[int], list[int]]]:
    plans = [rig.step() for _ in range(number)]
    return [(plan.starts, plan.counts) for plan in plans]


def test_bidirectional_images_are_computed_in_one_step(make_rig: MakeRig) -> None:
    rig = make_rig(vision=WHOLE, max_num_batched_tokens=24, max_num_encoder_tokens=64)
    add(rig, 1, 5, image(1, 0), 2, image(2, 0), image(3, 0), 1)
    assert steps_of(rig, 3) == [([0], [23]), ([23], [16]), ([39], [17])]
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_image_that_does_not_fit_waits_for_next_step(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(vision=WHOLE, max_num_batched_tokens=20, max_num_seqs=4)
    add(rig, 1, 10, max_tokens=8)
    add(rig, 2, 3, image(1, 0), 2, max_tokens=2)
    add(rig, 3, 30, max_tokens=2)
    plans = [rig.step() for _ in range(2)]
    assert [plan.counts for plan in plans] == [[10, 3, 7], [1, 1, 18]]
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


@pytest.mark.parametrize("windows", [(None,), (None, 24), (12, None)])
@pytest.mark.parametrize("blocks", [512, 40])
def test_no_chunk_ends_within_a_bidirectional_image(
    windows: tuple[int | None, ...], blocks: int, make_rig: MakeRig
) -> None:
    draws = random.Random(blocks)
    rig = make_rig(
        vision=WHOLE,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        num_kv_blocks=blocks * len(windows),
        cache_windows=windows,
        encoder_cache_bytes=32 * 1024,
    )
    shown: dict[int, list[EncoderInput]] = {}
    for id in range(40):
        parts = [draws.choice((draws.randint(1, 30), image(draws.randint(1, 5), 0), 3))
                 for _ in range(draws.randint(1, 4))]  # fmt: skip
        tokens, shown[id] = prompt(draws.randint(1, 5), *parts, 1)
        sampling = {"max_tokens": draws.randint(1, 12)}
        assert rig.add(id, tokens, images=shown[id], **sampling) is None
    for _ in range(2000):
        plan = rig.step()
        requests = {each.slot: each for each in rig.scheduler._requests.running.values()}
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            if slot in requests:
                for each in shown[requests[slot].id]:
                    end = start + count
                    assert not each.position < end < each.position + each.num_tokens
        if not plan.slots:
            break
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_images_used_in_a_step_are_not_evicted_for_encoded_ones(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, encoder_cache_bytes=32 * 1024, enable_prefix_caching=False)
    for id in (1, 2):
        add(rig, id, image(id, 0), 1)
        rig.run()
    add(rig, 3, image(3, 0), image(1, 0), 1)
    plan = rig.step()
    assert (encoded(plan), plan.evicted_images) == ([3], [image(2, 0).digest])
    rig.run()
    rig.assert_complete()


def test_chunks_can_end_within_an_image_which_stays_cached(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(
        vision=VISION, max_num_batched_tokens=10, max_num_encoder_tokens=64, encoder_cache_bytes=1
    )
    add(rig, 1, 5, image(1, 0), 9)
    add(rig, 2, image(2, 0), 1)
    plans = [rig.step() for _ in range(4)]
    assert [encoded(plan) for plan in plans] == [[1], [], [], [2]]
    assert [plan.evicted_images for plan in plans] == [[], [], [], [image(1, 0).digest]]
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_an_image_of_many_requests_is_encoded_once(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, max_num_encoder_tokens=16, num_kv_blocks=512)
    for id in range(32):
        add(rig, id, 1 + id, image(7, 0), 2)
    rig.run()
    rig.assert_complete()
    assert counts(rig) == (32, 31, 1)


def test_pixels_shared_by_requests_are_stored_once(rig: Any) -> None:
    for number in range(3):
        add(rig, number, 5, image(7, 0))
    pixels = {id(each.pixels) for r in rig.scheduler._requests.all.values() for each in r.images}
    assert len(pixels) == 1
    rig.run()
    rig.assert_idle()
    assert not rig.scheduler.encoder._pixels


def test_only_prompts_with_equal_images_share_blocks(rig: Any) -> None:
    add(rig, 1, 5, image(1, 0), 8)
    rig.run()
    add(rig, 2, 5, image(1, 0), 8)
    add(rig, 3, 5, image(2, 0), 8)
    rig.run()
    rig.assert_complete()  # with a KV cache that distinguishes images
    cached = [rig.first[id].num_cached_tokens for id in (1, 2, 3)]
    assert cached == [0, 28, 4]
    assert counts(rig)[2] == 2


def test_same_tokens_without_images_are_no_prefix(rig: Any) -> None:
    tokens, images = prompt(12, image(1, 0), 12)
    rig.add(1, tokens, images=images)
    rig.run()
    rig.add(2, tokens)
    rig.run()
    rig.add(3, tokens, images=images)
    rig.run()
    rig.assert_complete()
    assert [rig.first[id].num_cached_tokens for id in (1, 2, 3)] == [0, 12, 36]


def test_an_image_shifted_within_its_tokens_is_another_prefix(rig: Any) -> None:
    tokens = [VISION.token_id] * 17 + [1]
    rig.add(1, tokens, images=[image(1, 0)])
    rig.run()
    rig.add(2, tokens, images=[image(1, 1)])
    rig.run()
    rig.assert_complete()
    assert rig.first[2].num_cached_tokens == 0


def test_a_prefix_that_ends_within_an_image_needs_it_for_the_rest(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, encoder_cache_bytes=1)
    add(rig, 1, 6, image(1, 0), max_tokens=1)
    rig.run()
    add(rig, 2, 4, image(2, 0), max_tokens=1)  # which takes the room of the other one
    rig.run()
    add(rig, 3, 6, image(1, 0), 1, max_tokens=1)
    plan = rig.step()
    assert (plan.starts, encoded(plan)) == ([20], [1])
    rig.assert_complete()


def test_preempted_requests_get_their_images_again(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, num_kv_blocks=14, enable_prefix_caching=False)
    add(rig, 1, 3, image(1, 0), max_tokens=20)
    add(rig, 2, 3, image(2, 0), max_tokens=20)
    rig.run()
    rig.assert_complete()
    rig.assert_idle()
    assert rig.scheduler.counters.preemptions > 0
    queries, hits, number = counts(rig)
    assert (number, hits) == (2, queries - 2)


def test_moved_request_keeps_its_images(rig: Any) -> None:
    tokens, images = prompt(3, image(1, 0), 2)
    rig.add(1, tokens, images=images, output=[5, 6, 7], max_tokens=9)
    assert encoded(rig.step()) == [1]
    rig.run()
    rig.assert_complete()


def test_suspect_gets_space_for_its_image(make_rig: MakeRig) -> None:
    rig = make_rig(vision=VISION, max_num_batched_tokens=10, encoder_cache_bytes=1)
    add(rig, 1, 5, image(1, 0), 9)
    rig.step()  # ends within its image
    tokens, images = prompt(2, image(2, 0), 1)
    rig.add(2, tokens, images=images, alone=1)
    rig.run()
    rig.assert_complete()
    rig.assert_idle()


def test_images_are_dropped_on_reset_and_with_the_cache(rig: Any) -> None:
    add(rig, 1, image(1, 0), 1)
    rig.run()
    assert rig.scheduler.encoder.reset() == 1
    rig.scheduler.reset_prefix_cache()
    add(rig, 2, image(1, 0), 1)
    plan = rig.step()
    assert (plan.evicted_images, encoded(plan)) == ([image(1, 0).digest], [1])
    rig.scheduler.preempt_all()
    rig.scheduler.reset_prefix_cache()
    assert encoded(rig.step()) == [1]
    rig.run()
    rig.assert_complete()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position": -1}, "begins at token -1, before"),
        ({"position": 7}, "1 of its tokens do not stand for an image"),
        ({"position": 20}, "ends at token 36, but the prompt has 30"),
        ({"num_tokens": 15}, "8 x 8 pixels are 16 tokens, not 15"),
        ({"pixels": b"1"}, "1 bytes are not those of 8 x 8 pixels"),
        ({"digest": b"1"}, "its digest has 1 bytes instead of 16"),
        ({"height": 6}, "takes no image of 6 x 8 pixels"),
        ({"height": 10**9, "width": 10**9}, "takes no image of"),
    ],
)
def test_invalid_image_ends_only_its_request(
    changes: dict[str, Any], reason: str, rig: Any
) -> None:
    tokens, (right,) = prompt(6, image(1, 0), 8)
    answer = rig.add(1, tokens, images=[replace(right, **changes)])
    assert answer.finish_reason == "error"
    assert answer.error.startswith("encoder_inputs[0]: ")
    assert reason in answer.error
    rig.assert_idle()


def test_images_that_overlap_are_refused(rig: Any) -> None:
    tokens, (first,) = prompt(image(1, 0), 8)
    answer = rig.add(1, tokens, images=[first, first])
    assert answer.error == (
        "encoder_inputs[1]: it begins at token 0, before the end of the previous one"
    )


def test_text_models_refuse_images(make_rig: MakeRig) -> None:
    rig = make_rig()
    tokens, images = prompt(image(1, 0), 8)
    answer = rig.add(1, tokens, images=images)
    assert answer.error == (
        "this engine's model has no vision encoder, or one that is not implemented"
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_random_image_traffic_is_computed_correctly(
    seed: int, depth: int, make_rig: MakeRig
) -> None:
    """Of few images, with room for some of them, in small steps and with too few blocks."""
    source = random.Random(seed)
    rig = make_rig(
        vision=VISION,
        num_kv_blocks=source.choice([30, 60, 200]),
        max_num_batched_tokens=source.choice([8, 20, 64]),
        max_num_encoder_tokens=source.choice([16, 40]),
        encoder_cache_bytes=source.choice([1, 40, 200]) * 1024,
        scheduling_policy=source.choice(["fcfs", "priority"]),
    )
    for id in range(40):
        parts: list[int | EncoderInput] = [source.randrange(6)]
        for _ in range(source.randrange(4)):
            parts += [image(source.randrange(6), 0, source.choice([4, 8])), source.randrange(4)]
        tokens, images = prompt(*parts, 1)
        images = [
            replace(each, digest=each.digest[:8] + each.height.to_bytes(8)) for each in images
        ]
        rig.add(
            id,
            tokens,
            images=images,
            priority=source.randrange(3),
            alone=int(source.random() < 0.1),
            max_tokens=source.randrange(1, 9),
        )
        for _ in range(source.randrange(3)):
            rig.schedule()
            if len(rig.in_flight) >= depth:
                rig.update()
        if source.random() < 0.1:
            rig.scheduler.encoder.reset()
        if source.random() < 0.2:
            aborted = source.choice(list(rig.requests))
            rig.scheduler.abort([aborted])
    rig.run(depth=depth)
    done = [id for id in rig.requests if id in rig.last]
    rig.assert_complete(*done)
    rig.assert_idle()


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ([9, 9, 1, 9, 9], None),
        ([9, 9, 1, 9, 1], "1 of its tokens do not stand for an image"),
        ([9, 9, 9, 9, 9], "-1 of its tokens do not stand for an image"),
    ],
)
def test_rows_of_an_image_have_a_token_of_text_between_them(
    shown: list[int], reason: str | None
) -> None:
    vision = TowerSpec(token_id=9, image_size=8, patch_size=2, scale_factor=1, is_square=False)
    message = AddRequest(1, "", 0, 0, [1, *shown, 1], SamplingParams(max_tokens=1, seed=0))
    image = EncoderInput(1, 5, bytes(16), 4, 4, bytes(48))
    found = bad_images(replace(message, encoder_inputs=[image]), vision)
    assert found == (None if reason is None else f"encoder_inputs[0]: {reason}")
