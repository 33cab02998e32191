"""Masks that threads compute, seen from the thread that steps."""

import threading

from engine.grammar.mask_threads import Following, MaskJob, MaskThreads


def test_a_job_may_be_asked_at_any_moment_whether_it_takes_too_long() -> None:
    answers: list[bool] = []

    class Asked(Following):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if isinstance(value, MaskJob):  # the step thread may look just now
                answers.append(value.is_over)

    computed = threading.Event()
    threads = MaskThreads()
    try:
        job = MaskJob(Asked(), computed.set)
        threads.run([job], seconds=60)
    finally:
        threads.shutdown()
    assert computed.is_set()
    assert answers == [False]
    assert job.seconds is not None


def test_a_job_that_waits_for_another_of_its_grammar_is_late_when_that_one_is() -> None:
    following, go_on = Following(), threading.Event()
    threads = MaskThreads()
    busy = MaskJob(following, lambda: _burn_until(go_on))
    waiting = MaskJob(following, lambda: None)
    try:
        threads.run([busy, waiting], seconds=0.3)
        while not busy.is_over:
            pass
        assert waiting.is_over
    finally:
        go_on.set()
        threads.shutdown()


def _burn_until(go_on: threading.Event) -> None:
    while not go_on.is_set():
        pass
