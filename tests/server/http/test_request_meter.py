"""Bytes sent by a connection are counted in every phase of a request."""

from collections.abc import Callable

import pytest

from server.http.request_meter import (
    BYTES_PER_CHUNK,
    FRAMING,
    FREE_CHUNKS,
    MAX_PIPELINED,
    UNREAD,
    LimitExceeded,
    MeterLimits,
    Phase,
    RequestMeter,
)

LIMITS = MeterLimits(head=1000, body=5000)


def meter_at(phase: Phase) -> RequestMeter:
    meter = RequestMeter(LIMITS)
    if phase is not Phase.IDLE:
        meter.begin()
    if phase is Phase.BODY:
        meter.head_ends(0)
        meter.read(100)
    return meter


def refused_after(meter: RequestMeter, size: int, before: Callable[[], object]) -> tuple[int, int]:
    """Feed pieces until refused; return the status and the number of accepted bytes."""
    fed = 0
    while fed < 10**6:
        before()
        try:
            meter.read(size)
        except LimitExceeded as excess:
            return excess.status, fed
        fed += size
    return 0, fed


@pytest.mark.parametrize("size", [1, 100, 999])
def test_head_is_bounded(size: int) -> None:
    status, fed = refused_after(meter_at(Phase.HEAD), size, lambda: None)
    assert status == 431
    assert fed <= LIMITS.head


@pytest.mark.parametrize("size", [1, 100, 999])
def test_trailers_and_chunk_extensions_are_bounded(size: int) -> None:
    status, fed = refused_after(meter_at(Phase.BODY), size, lambda: None)
    assert status == 431
    assert fed <= LIMITS.head


def test_one_byte_pieces_are_accepted_up_to_body_limit() -> None:
    meter = meter_at(Phase.BODY)
    status, fed = refused_after(meter, 6, lambda: meter.body(1))
    assert status == 413
    assert fed >= 6 * LIMITS.body
    assert fed <= FRAMING * LIMITS.body + LIMITS.head


def test_a_body_in_tiny_chunks_does_not_keep_the_parser_busy() -> None:
    meter = meter_at(Phase.BODY)
    for _ in range(FREE_CHUNKS):
        meter.chunk()
    with pytest.raises(LimitExceeded) as raised:
        meter.chunk()
    assert raised.value.status == 413


def test_body_in_moderate_chunks_is_accepted() -> None:
    meter = meter_at(Phase.BODY)
    for _ in range(100 * FREE_CHUNKS):
        meter.chunk()
        meter.body(BYTES_PER_CHUNK)


def test_trailers_are_discarded_and_bounded_within_one_read() -> None:
    meter = meter_at(Phase.BODY)
    assert not meter.field(400)
    assert not meter.field(400)
    with pytest.raises(LimitExceeded):
        meter.field(400)
    assert meter_at(Phase.HEAD).field(400)


def test_rest_of_answered_body_is_bounded() -> None:
    meter = meter_at(Phase.BODY)
    assert meter.answered()
    status, fed = refused_after(meter, 100, lambda: meter.body(100))
    assert status == 413
    assert fed <= LIMITS.head + UNREAD * LIMITS.body


def test_complete_request_leaves_nothing_to_drain() -> None:
    meter = meter_at(Phase.BODY)
    meter.end()
    assert not meter.answered()
    assert meter.phase is Phase.IDLE
    meter.begin()
    meter.head_ends(0)
    meter.read(LIMITS.head)


def test_requests_that_wait_for_answers_are_counted() -> None:
    meter = meter_at(Phase.HEAD)
    meter.head_ends(MAX_PIPELINED - 1)
    meter.end()
    meter.begin()
    with pytest.raises(LimitExceeded):
        meter.head_ends(MAX_PIPELINED)
