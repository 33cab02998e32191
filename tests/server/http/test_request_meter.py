"""What is counted of a body in small pieces; test_http_protocol.py shows all other limits."""

import pytest

from server.http.request_meter import (
    BYTES_PER_CHUNK,
    FRAMING,
    FREE_CHUNKS,
    LimitExceeded,
    MeterLimits,
    Phase,
    RequestMeter,
)

LIMITS = MeterLimits(head=1000, body=5000)


@pytest.fixture
def meter() -> RequestMeter:
    """A meter in the body of a request."""
    made = RequestMeter(LIMITS)
    made.begin()
    made.head_ends(0)
    made.read(100)
    return made


def test_one_byte_pieces_are_accepted_up_to_body_limit(meter: RequestMeter) -> None:
    fed: list[int] = []

    def feed(size: int) -> bool:
        meter.body(1)
        meter.read(size)
        fed.append(size)
        return False

    with pytest.raises(LimitExceeded) as excess:
        any(feed(6) for _ in range(10**6))
    assert excess.value.status == 413
    assert 6 * LIMITS.body <= sum(fed) <= FRAMING * LIMITS.body + LIMITS.head


@pytest.mark.parametrize("size", [1, 100, 999])
def test_trailers_and_chunk_extensions_are_bounded(meter: RequestMeter, size: int) -> None:
    for _ in range(LIMITS.head // size):
        meter.read(size)
    with pytest.raises(LimitExceeded) as excess:
        meter.read(size)
    assert excess.value.status == 431


def test_body_in_moderate_chunks_is_accepted(meter: RequestMeter) -> None:
    for _ in range(100 * FREE_CHUNKS):
        meter.chunk()
        meter.body(BYTES_PER_CHUNK)


def test_complete_request_leaves_nothing_to_drain(meter: RequestMeter) -> None:
    meter.end()
    assert not meter.answered()
    assert meter.phase is Phase.IDLE
