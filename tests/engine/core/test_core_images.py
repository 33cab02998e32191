"""Engines report image support, and fail only the requests with invalid images."""

from msgspec.structs import replace

from engine.core.engine_core import EngineCore
from engine.shared.messages import AddRequest, SamplingParams, UtilityCall
from tests.engine.core.conftest import CONFIG, run
from tests.engine.scheduler.test_images import VISION, image, prompt
from tests.support.checked_executor import CheckedExecutor


def core_of(vision: bool = True) -> EngineCore:
    executor = CheckedExecutor(CONFIG, vision=VISION if vision else None)
    core = EngineCore(CONFIG, executor, rank=2, incarnation=77)
    core.front_end_joined(0, 100)
    return core


def request(id: int, number: int) -> AddRequest:
    tokens, images = prompt(3, image(number, 0), 2)
    sampling = SamplingParams(max_tokens=3, seed=id)
    return AddRequest(id, f"request-{id}", 0, 0, tokens, sampling, encoder_inputs=images)


def test_setup_reports_whether_images_are_accepted() -> None:
    assert core_of().setup.images
    assert not core_of(vision=False).setup.images


def test_invalid_image_ends_only_its_request() -> None:
    core = core_of()
    wrong = request(2, 1)
    for each in (
        request(1, 1),
        replace(wrong, encoder_inputs=[replace(wrong.encoder_inputs[0], pixels=b"x")]),
        request(3, 1),
    ):
        core.handle(each)
    outputs = [output for step in run(core) for output in step.outputs.get(0, [])]
    reasons = {each.id: each.finish_reason for each in outputs if each.finish_reason}
    assert reasons == {1: "length", 2: "error", 3: "length"}
    (error,) = [each.error for each in outputs if each.error]
    assert error == "encoder_inputs[0]: 1 bytes are not those of 8 x 8 pixels"
    counters = core.stats().counters
    assert (counters.encoded_images, counters.encoder_cache_hits) == (1, 1)


def by_digest(request: AddRequest) -> AddRequest:
    """Return the request as sent to an engine that already has its images."""
    images = [replace(each, pixels=b"") for each in request.encoder_inputs]
    return replace(request, encoder_inputs=images)


def test_image_sent_earlier_is_reused() -> None:
    core = core_of()
    core.handle(request(1, 1))
    core.handle(by_digest(request(2, 1)))
    outputs = [output for step in run(core) for output in step.outputs.get(0, [])]
    reasons = {each.id: each.finish_reason for each in outputs if each.finish_reason}
    assert reasons == {1: "length", 2: "length"}


def test_a_request_whose_images_were_lost_does_not_count_as_received() -> None:
    core = core_of()
    core.handle(by_digest(request(1, 1)))
    assert [each.requests for each in core.stats().received] == [0]
    assert not run(core)
    core.front_end_joined(1, 200)
    core.handle(request(2, 1))
    core.handle(replace(by_digest(request(3, 1)), front_end=1))
    assert [each.requests for each in core.stats().received] == [1, 0], "each has its own window"


def test_the_watchdog_counts_the_patches_that_a_step_encodes() -> None:
    core = core_of()
    core.handle(replace(request(1, 1), encoder_inputs=[]))
    assert core.next_tokens == 16
    core.handle(request(2, 1))
    assert core.next_tokens == 16 + 16 * 4
    run(core)
    assert core.next_tokens == 0


def test_operators_can_reset_encoder_cache() -> None:
    core = core_of()
    for id, number in ((1, 1), (2, 2)):
        core.handle(request(id, number))
    run(core)
    core.handle(UtilityCall(1, 0, "reset_encoder_cache"))
    (result,) = [each for step in run(core) for _, each in step.utility_results]
    assert result.result == {"images_forgotten": 2}
