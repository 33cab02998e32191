"""Tenants share the threads in front of the engines."""

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.shared.fair_threads import FairExecutor, FairQueue, FairThreads, QueueFull, tenant_id
from tests.support.waiting import PATIENCE

GUARD = PATIENCE
"""Seconds that nothing here takes."""


def drained(queue: FairQueue[str], seconds: dict[Hashable, float]) -> list[str]:
    """Return all items in the order in which they come, where each takes its tenant's time."""
    order = []
    while (found := queue.pop()) is not None:
        tenant, item = found
        order.append(item)
        queue.finish(tenant, seconds[tenant])
    return order


def test_fairness_is_by_time_and_not_by_items() -> None:
    queue: FairQueue[str] = FairQueue(100, 50)
    for number in range(3):
        queue.push(1, f"a{number}")
    for number in range(6):
        queue.push(2, f"b{number}")
    order = drained(queue, {1: 3.0, 2: 1.0})
    assert order == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "b5", "a2"]


def test_late_tenants_get_no_compensation() -> None:
    queue: FairQueue[str] = FairQueue(100, 50)
    for number in range(3):
        queue.push(1, f"a{number}")
    for _ in range(2):
        assert queue.pop() is not None
        queue.finish(1, 5.0)
    for number in range(3):
        queue.push(2, f"b{number}")
    assert drained(queue, {1: 1.0, 2: 1.0}) == ["a2", "b0", "b1", "b2"]


def test_tenant_fills_only_its_share() -> None:
    queue: FairQueue[str] = FairQueue(5, 3)
    for _ in range(3):
        queue.push(1, "a")
    with pytest.raises(QueueFull):
        queue.push(1, "a")
    queue.push(2, "b")
    queue.push(2, "b")
    with pytest.raises(QueueFull):
        queue.push(3, "c")
    assert len(queue) == 5


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_single_tenant_is_served_and_gets_its_errors(
    threads: ThreadPoolExecutor,
) -> None:
    executor = FairExecutor(threads.submit, 2, max_waiting=4, max_of_tenant=2)
    release = threading.Event()
    held = [executor.submit(1, release.wait, GUARD) for _ in range(3)]
    with pytest.raises(QueueFull):
        executor.submit(1, release.wait)
    release.set()
    assert all(each.result(GUARD) for each in held)
    with pytest.raises(ZeroDivisionError):
        executor.submit(1, lambda: 1 // 0).result(GUARD)
    cancelled = executor.submit(1, pow, 2, 3)
    assert cancelled.cancel() or cancelled.result(GUARD) == 8
    assert executor.submit(1, pow, 2, 4).result(GUARD) == 16


class Gate:
    """Work that waits until it is let go, and notes who began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.open = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def wait() -> str:
            self.began.append(name)
            assert self.open.wait(GUARD)
            return name

        return wait


@pytest.mark.parametrize("threads", [2, 6])
def test_flood_of_one_tenant_does_not_delay_another(threads: int) -> None:
    asyncio.run(_flood(threads))


async def _flood(threads: int) -> None:
    asyncio.get_running_loop().set_default_executor(FairThreads(threads, "test"))
    gate = Gate()

    async def of(tenant: int, work: Callable[[], str]) -> str:
        tenant_id.set(tenant)
        return await asyncio.to_thread(work)

    flood = [asyncio.create_task(of(1, gate.work(f"flood {n}"))) for n in range(100)]
    other = asyncio.create_task(of(2, lambda: "other"))
    assert await asyncio.wait_for(other, GUARD) == "other"
    assert len(gate.began) < threads
    gate.open.set()
    assert await asyncio.wait_for(asyncio.gather(*flood), GUARD) == [
        f"flood {n}" for n in range(100)
    ]


def test_single_thread_alternates_tenants() -> None:
    asyncio.run(_one_thread())


async def _one_thread() -> None:
    asyncio.get_running_loop().set_default_executor(FairThreads(1, "test"))
    gate, done = Gate(), list[str]()

    async def of(tenant: int, name: str) -> None:
        tenant_id.set(tenant)
        done.append(await asyncio.to_thread(gate.work(name)))

    tasks = [asyncio.create_task(of(1, f"flood {n}")) for n in range(10)]
    tasks.append(asyncio.create_task(of(2, "other")))
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.wait_for(asyncio.gather(*tasks), GUARD)
    assert done.index("other") <= 2


def test_errors_and_cancelled_work_free_their_threads() -> None:
    pool = FairThreads(1, "test")
    gate = Gate()
    running = pool.submit(gate.work("first"))
    cancelled = pool.submit(gate.work("second"))
    failing = pool.submit(lambda: 1 // 0)
    assert cancelled.cancel()
    gate.open.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(GUARD)
    assert running.result(GUARD) == "first"
    assert pool.submit(lambda: 5).result(GUARD) == 5
    assert gate.began == ["first"]
    pool.shutdown()
