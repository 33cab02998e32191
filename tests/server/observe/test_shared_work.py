import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from server.observe.shared_work import SHARE, SharedWork


def test_slow_scrape_is_shared_and_does_not_block_event_loop() -> None:
    begun, go_on = threading.Event(), threading.Event()
    times = 0

    def work() -> int:
        nonlocal times
        times += 1
        begun.set()
        assert go_on.wait(60)
        return times

    async def ask() -> list[int]:
        shared = SharedWork(lambda: work)
        asked = [asyncio.create_task(shared.result()) for _ in range(5)]
        while not begun.is_set():
            await asyncio.sleep(0)  # the event loop runs while the thread waits
        asked.pop().cancel()
        await asyncio.sleep(0)
        go_on.set()
        first = await asyncio.gather(*asked)
        return [*first, await shared.result()]

    assert asyncio.run(ask()) == [1, 1, 1, 1, 2]


def test_failed_work_raises_for_all_waiters_and_next_call_retries() -> None:
    results: Iterator[Exception | int] = iter([ValueError("no file"), 7])

    def work() -> int:
        result = next(results)
        if not isinstance(result, int):
            raise result
        return result

    async def ask() -> int:
        shared = SharedWork(lambda: work)
        with pytest.raises(ValueError, match="no file"):
            await shared.result()
        return await shared.result()

    assert asyncio.run(ask()) == 7


def test_constant_scraping_takes_only_a_share_of_a_processor() -> None:
    async def ask() -> float:
        shared = SharedWork(lambda: lambda: time.sleep(0.01))
        began = time.monotonic()
        for _ in range(4):
            await shared.result()
        return time.monotonic() - began

    assert asyncio.run(ask()) > 0.01 + 3 * 0.01 / SHARE - 0.002
