"""Images are sent once, and engines still have all images that front ends omit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.shared.image_window import ImageWindow
from engine.shared.messages import AddRequest, EncoderInput, SamplingParams

ROOM = 100


def image(number: int, size: int) -> EncoderInput:
    return EncoderInput(number, 1, b"%16d" % number, 1, 1, bytes([number]) * size)


def request(*images: EncoderInput) -> AddRequest:
    return AddRequest(
        1, "", 0, 0, [1], SamplingParams(max_tokens=1, seed=1), encoder_inputs=list(images)
    )


def sent_bytes(message: AddRequest) -> list[int]:
    return [len(each.pixels) for each in message.encoder_inputs]


def test_image_held_by_engine_is_sent_as_digest() -> None:
    front_end, engine = ImageWindow(ROOM), ImageWindow(ROOM)
    first, second = image(1, 40), image(2, 30)
    for images, crossing in ([first], [40]), ([first, second], [0, 30]), ([second, second], [0, 0]):
        message = front_end.omit_held(request(*images))
        assert sent_bytes(message) == crossing
        assert engine.restore_held(message) == request(*images)


def test_the_least_recently_used_image_is_sent_again() -> None:
    front_end = ImageWindow(ROOM)
    for number in (1, 2, 1, 3):
        front_end.omit_held(request(image(number, 40)))
    again = [sent_bytes(front_end.omit_held(request(image(n, 40)))) for n in (1, 3, 2)]
    assert again == [[0], [0], [40]]


def test_an_image_larger_than_the_window_is_always_sent_and_drops_no_other() -> None:
    front_end = ImageWindow(ROOM)
    sizes = [
        sent_bytes(front_end.omit_held(request(image(number, size))))
        for number, size in ((1, 40), (2, ROOM + 1), (2, ROOM + 1), (1, 40))
    ]
    assert sizes == [[40], [101], [101], [0]]


def test_an_engine_without_a_window_gets_every_image() -> None:
    front_end = ImageWindow(0)
    assert [sent_bytes(front_end.omit_held(request(image(1, 9)))) for _ in (1, 2)] == [[9], [9]]


def test_lost_message_is_detected() -> None:
    front_end, engine = ImageWindow(ROOM), ImageWindow(ROOM)
    front_end.omit_held(request(image(1, 40)))
    with pytest.raises(KeyError):
        engine.restore_held(front_end.omit_held(request(image(1, 40))))


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.just("messages may be lost"),
            st.lists(st.integers(0, 9), min_size=1, max_size=4),
        ),
        max_size=40,
    )
)
def test_an_engine_always_has_the_omitted_images(
    course: list[str | list[int]],
) -> None:
    front_end, engine = ImageWindow(ROOM), ImageWindow(ROOM)
    for event in course:
        if isinstance(event, str):
            front_end = ImageWindow(ROOM)
            continue
        wanted = request(*(image(number, 10 + 11 * number) for number in event))
        assert engine.restore_held(front_end.omit_held(wanted)) == wanted
