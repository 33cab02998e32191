from engine.shared.messages import RequestTiming
from server.router.request import EngineTimes


def test_one_engine_says_it_all() -> None:
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


def test_an_engine_that_was_lost_before_its_first_output_was_a_queue() -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    times.left(7.0)
    times.sent(1, 7.0)
    times.record_timing(RequestTiming(0.5, 0.25, 0.0), 8.0, last=True)
    assert times.ended(8.0) == RequestTiming(7.5, 0.25, 0.0)


def test_a_request_that_nobody_wanted_to_the_end_decoded_until_then() -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    times.record_timing(RequestTiming(1.0, 2.0), 3.0, last=False)
    assert times.ended(9.0) == RequestTiming(1.0, 2.0, 6.0)


def test_a_request_given_up_in_the_queue_has_no_times() -> None:
    times = EngineTimes()
    times.sent(0, 0.0)
    assert times.ended(9.0) is None
