from engine.shared.messages import RequestTiming
from server.router.request import EngineTimes


def test_timing_of_single_engine_is_as_reported() -> None:
    times = EngineTimes()
    times.sent(2, 100.0)
    times.record_timing(RequestTiming(1.0, 2.0), 104.0, last=False)
    times.record_timing(RequestTiming(1.0, 2.0, 4.0), 109.0, last=True)
    assert times.engine == 2
    assert times.ended(150.0) == RequestTiming(1.0, 2.0, 4.0)


def test_a_request_that_moved_sums_its_parts() -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    times.record_timing(RequestTiming(1.0, 2.0, 0.0, 1), 4.0, last=False)
    times.left(9.0)  # five seconds after its first output there
    times.left(9.5)  # no engine yet
    times.sent(1, 10.0)
    times.record_timing(RequestTiming(0.25, 0.5), 11.0, last=False)
    times.record_timing(RequestTiming(0.25, 0.5, 8.0, 2), 19.0, last=True)
    assert times.engine == 1
    assert times.ended(20.0) == RequestTiming(1.0 + 1.0 + 0.25, 2.0 + 0.5, 5.0 + 8.0, 3)


def test_time_on_engine_lost_before_output_counts_as_queue_time() -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    times.left(7.0)
    times.sent(1, 7.0)
    times.record_timing(RequestTiming(0.5, 0.25, 0.0), 8.0, last=True)
    assert times.ended(8.0) == RequestTiming(7.5, 0.25, 0.0)


def test_aborted_request_counts_decode_time_until_abort() -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    times.record_timing(RequestTiming(1.0, 2.0), 3.0, last=False)
    assert times.ended(9.0) == RequestTiming(1.0, 2.0, 6.0)


def test_request_aborted_in_queue_has_no_times() -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    assert times.ended(9.0) is None
