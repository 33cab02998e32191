"""Bodies in small pieces are accepted; test_http_protocol.py shows what is refused."""

import pytest

from server.http.request_meter import (
    BYTES_PER_CHUNK,
    FRAMING,
    FREE_CHUNKS,
    LimitExceeded,
    MeterLimits,
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
    pieces = 0
    with pytest.raises(LimitExceeded) as excess:
        while pieces < 10**6:
            meter.body(1)
            meter.read(6)
            pieces += 1
    assert excess.value.status == 413
    assert LIMITS.body <= pieces <= (FRAMING * LIMITS.body + LIMITS.head) / 6


def test_body_in_moderate_chunks_is_accepted(meter: RequestMeter) -> None:
    for _ in range(100 * FREE_CHUNKS):
        meter.chunk()
        meter.body(BYTES_PER_CHUNK)
