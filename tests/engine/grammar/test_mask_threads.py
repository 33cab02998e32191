"""Masks computed in threads, as seen by the step thread."""

import threading

from engine.grammar.mask_threads import PATIENCE, GrammarState, MaskJob, MaskThreads


def test_job_can_be_checked_for_timeout_at_any_time() -> None:
    answers: list[bool] = []

    class Asked(GrammarState):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if isinstance(value, MaskJob):  # the step thread may read it at this moment
                answers.append(value.is_over)

    computed = threading.Event()
    threads = MaskThreads()
    try:
        job = MaskJob(Asked(), computed.set)
        threads.wait(threads.start([job]), 60, seconds=60)
    finally:
        threads.shutdown()
    assert computed.is_set()
    assert answers == [False]
    assert job.seconds is not None


def test_job_waiting_for_late_job_of_its_grammar_is_late() -> None:
    state, go_on = GrammarState(), threading.Event()
    threads = MaskThreads()
    busy = MaskJob(state, lambda: _burn_until(go_on))
    waiting = MaskJob(state, lambda: None)
    try:
        threads.wait(threads.start([busy, waiting]), 60, seconds=0.3)
        while not busy.is_over:
            pass
        assert waiting.is_over
    finally:
        go_on.set()
        threads.shutdown()


def test_step_does_not_wait_for_single_slow_mask() -> None:
    go_on, threads = threading.Event(), MaskThreads()
    busy = [MaskJob(GrammarState(), lambda: _burn_until(go_on)) for _ in range(2)]
    quick = [MaskJob(GrammarState(), lambda: None) for _ in range(8)]
    try:
        threads.wait(threads.start([*busy, *quick]), PATIENCE, seconds=3600)
        assert [job.seconds is not None for job in (*busy, *quick)] == [False] * 2 + [True] * 8
        again = MaskJob(GrammarState(), lambda: None)
        threads.wait(threads.start([again]), PATIENCE, seconds=3600)
        assert again.seconds is not None, "there are threads left"
        go_on.set()
        while any(job.seconds is None for job in busy):
            pass
    finally:
        go_on.set()
        threads.shutdown()


def test_step_does_not_wait_if_all_threads_run_slow_masks() -> None:
    go_on, threads = threading.Event(), MaskThreads()
    busy = [MaskJob(GrammarState(), lambda: _burn_until(go_on)) for _ in range(8)]
    later = MaskJob(GrammarState(), lambda: None)
    try:
        threads.wait(threads.start(busy), PATIENCE, seconds=3600)
        threads.wait(threads.start([later]), PATIENCE, seconds=3600)
        assert not later.has_started
    finally:
        go_on.set()
        threads.shutdown()


def _burn_until(go_on: threading.Event) -> None:
    while not go_on.is_set():
        pass
