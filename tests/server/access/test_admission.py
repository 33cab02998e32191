"""Which requests are admitted and which must retry, across all front ends of a node."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.shared.messages import RequestOutput
from server.access.admission import LONGEST_RETRY_AFTER, Admission, DrainRate, Overloaded
from server.access.admission_table import AdmissionTable, Totals, create_admission_table
from server.config import FrontEndConfig, OverloadConfig
from tests.server.conftest import Http, app_of, tiny

ROOT = Path(__file__).parents[3]

TAKER = """
import sys
from pathlib import Path
from server.access.admission import Admission, Overloaded
from server.access.admission_table import AdmissionTable
from server.config import OverloadConfig

table = AdmissionTable(Path(sys.argv[1]), int(sys.argv[2]))
admission = Admission(table, OverloadConfig(max_queue=int(sys.argv[3])), lambda: 4)
print("there", flush=True)
for line in sys.stdin:
    taken = 0
    for _ in range(int(line)):
        try:
            admission.reserve(1, 10, 0.0)
        except Overloaded:
            continue
        taken += 1
    print(taken, flush=True)
"""


def admission(
    directory: Path | None = None, index: int = 0, *, slots: int = 0, **limits: Any
) -> Admission:
    return Admission(AdmissionTable(directory, index), OverloadConfig(**limits), lambda: slots)


class Taker:
    """A front-end process that submits requests as instructed, subject to admission."""

    def __init__(self, directory: Path, index: int, max_queue: int) -> None:
        arguments = [str(directory), str(index), str(max_queue)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.line() == "there"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, count: int) -> None:
        assert self.process.stdin is not None
        print(count, file=self.process.stdin, flush=True)

    def end(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)
        self.process.communicate()


def test_running_requests_do_not_count_against_the_queue() -> None:
    node = admission(slots=3, max_queue=2)
    reservations = [node.reserve(1, 10, 0.0) for _ in range(5)]
    with pytest.raises(Overloaded) as refused:
        node.reserve(1, 10, 0.0)
    assert refused.value.what == "requests"
    reservations[0].release()
    reservations[0].release()
    node.reserve(1, 10, 0.0)
    with pytest.raises(Overloaded):
        node.reserve(1, 10, 0.0)


def test_prompt_tokens_count_until_they_are_computed() -> None:
    node = admission(max_queue_tokens=100)
    first = node.reserve(1, 60, 0.0)
    with pytest.raises(Overloaded, match="prompt tokens"):
        node.reserve(1, 50, 0.0)
    first.recount(30, 0.0)
    second = node.reserve(1, 50, 0.0)
    with pytest.raises(Overloaded):
        second.recount(80, 0.0)
    first.computed(30)
    second.recount(80, 0.0)
    assert node.table.totals() == Totals(2, 80)
    first.release()
    second.release()
    assert node.table.totals() == Totals(0, 0)
    assert node.table.ended() == 2


def test_request_larger_than_queue_is_accepted_if_alone() -> None:
    node = admission(max_queue=4, max_queue_tokens=100)
    huge = node.reserve(50, 1000, 0.0)
    huge.recount(2000, 0.0)
    with pytest.raises(Overloaded):
        node.reserve(1, 1, 0.0)
    huge.release()
    node.reserve(1, 1, 0.0)
    with pytest.raises(Overloaded):
        node.reserve(50, 1, 0.0)


def test_bursts_through_several_processes_fill_the_queue_exactly(tmp_path: Path) -> None:
    create_admission_table(tmp_path, 3)
    limit = 2000
    takers = [Taker(tmp_path, index, limit) for index in range(3)]
    try:
        for taker in takers:
            taker.ask(3000)
        taken = [int(taker.line()) for taker in takers]
        assert sum(taken) == limit + 4, taken
    finally:
        for taker in takers:
            taker.end()


def test_front_end_suspended_with_the_lock_blocks_no_other(tmp_path: Path) -> None:
    create_admission_table(tmp_path, 2)
    node = admission(tmp_path, 0, max_queue=3)
    program = (
        "import fcntl, sys, time\n"
        "fcntl.flock(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "rows")], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        for _ in range(3):
            node.reserve(1, 10, 0.0)
        with pytest.raises(Overloaded):
            node.reserve(1, 10, 0.0)
    finally:
        holder.kill()
        holder.communicate()


def test_retry_after_follows_from_measured_drain_rate() -> None:
    node = admission(max_queue=40)
    now = 100.0
    reservations = [node.reserve(1, 1, now) for _ in range(40)]
    with pytest.raises(Overloaded) as refused:
        node.reserve(1, 1, now)
    assert refused.value.retry_after == 1
    for _ in range(8):
        now += 1.0
        reservations.pop().release()
        reservations.append(node.reserve(1, 1, now))
    with pytest.raises(Overloaded) as refused:
        node.reserve(1, 1, now)
    # At one per second, half of the 40 waiting requests are done after 20 s.
    assert refused.value.retry_after == pytest.approx(20, abs=1)
    now += 5.0
    node._rate.sample(now, node.table.ended())
    with pytest.raises(Overloaded) as refused:
        node.reserve(1, 1, now + 5.0)
    assert 20 < refused.value.retry_after <= LONGEST_RETRY_AFTER


def test_the_drain_rate_forgets_old_samples() -> None:
    rate = DrainRate()
    assert rate.seconds_for(10, 0.0, 0) == 0.0
    for second in range(11):
        rate.sample(float(second), second * 2)
    assert rate.seconds_for(10, 10.0, 20) == pytest.approx(5.0)
    rate.sample(100.0, 20)
    assert rate.seconds_for(10, 100.0, 20) == 0.0


class TestOverHttp:
    @pytest.fixture
    def config(self) -> FrontEndConfig:
        return tiny(overload=OverloadConfig(max_queue=1, max_queue_tokens=50))

    def fill(self, app: Any, engines: Any, count: int, **fields: Any) -> list[Any]:
        """Send requests at once; only refused ones are answered; then disconnect."""
        import httpx

        engines.script = lambda stream: []

        async def run() -> list[Any]:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://swell") as client:
                body = {"prompt": "hi", **fields}
                calls = [
                    asyncio.create_task(client.post("/v1/completions", json=body))
                    for _ in range(count)
                ]
                taken: set[str] = set()
                while sum(call.done() for call in calls) + len(taken) < count:
                    await asyncio.sleep(0)
                    taken = {stream.request_id[:32] for stream in engines.streams}
                answers = [call.result() for call in calls if call.done()]
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                return answers

        return asyncio.run(asyncio.wait_for(run(), 60))

    def test_excess_requests_get_a_retry_after_and_leave_nothing_behind(
        self, app: Any, engines: Any, http: Any
    ) -> None:
        answers = self.fill(app, engines, 9)
        assert len(engines.streams) == 5
        assert [answer.status_code for answer in answers] == [429] * 4
        error = answers[0].json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert error["type"] == "requests"
        assert int(answers[0].headers["retry-after"]) >= 1
        metrics = http.get("/metrics").text
        rejections = 'swell_admission_rejections_total{model_name="tiny",reason="queue"} 4.0'
        assert rejections in metrics
        engines.streams.clear()
        assert len(self.fill(app, engines, 8)) == 3

    def test_refused_requests_are_not_tokenized(
        self,
        config: FrontEndConfig,
        engines: Any,
        tokenizer: Any,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        """Refusing costs next to nothing."""
        create_admission_table(tmp_path / "table", 2)
        table = AdmissionTable(tmp_path / "table", 0)
        http = Http(app_of(config, engines, tokenizer, table=table))
        others = admission(tmp_path / "table", 1, slots=engines.num_slots, max_queue=1)
        others.reserve(engines.num_slots + 1, 1, now=0.0)
        read: list[str] = []
        for method in ("encode", "encode_many", "encode_async", "encode_many_async"):
            monkeypatch.setattr(tokenizer, method, lambda *_, **__: read.append("text"))
        monkeypatch.setattr("server.generate.prompts.rendered", lambda *_: read.append(""))
        turns = [{"role": "user", "content": "hello"}]
        for path, body in {
            "/v1/completions": {"prompt": ["hello"] * 2},
            "/v1/chat/completions": {"messages": turns, "n": 2},
            "/v1/messages": {"model": "tiny", "messages": turns * 100, "max_tokens": 1},
            "/v1/responses": {"input": "hello" * 100},
        }.items():
            assert http.post(path, body).status_code == 429, path
        assert read == []

    def test_every_sequence_counts_against_the_queue(self, app: Any, engines: Any) -> None:
        (refused,) = self.fill(app, engines, 2, n=5)
        assert refused.status_code == 429
        engines.streams.clear()
        (refused,) = self.fill(app, engines, 2, n=2, prompt=["a", "b"], best_of=2)
        assert refused.status_code == 429

    def test_refused_bodies_and_failures_release_their_reservation(
        self, app: Any, engines: Any, http: Any
    ) -> None:
        engines.num_slots = 0
        for _ in range(4):
            assert http.post("/v1/completions", {"prompt": ""}).status_code == 400
            engines.script = lambda stream: [RequestOutput(1, [], "error", error="out of luck")]
            assert http.post("/v1/completions", {"prompt": "a"}).status_code == 500
            engines.script = engines.answer("hello")
            assert http.complete()["choices"]
            assert http.chat()["choices"]


@pytest.mark.parametrize("amounts", [(2**62, 1), (1, 2**62), (10**30, 1), (1, 10**30), (-1, 0)])
def test_an_impossible_amount_changes_nothing(tmp_path: Path, amounts: tuple[int, int]) -> None:
    create_admission_table(tmp_path / "table", 2)
    node = admission(tmp_path / "table", max_queue=4, max_queue_tokens=100)
    with pytest.raises(Overloaded if min(amounts) >= 0 else ValueError):
        node.reserve(*amounts, now=0.0)
    assert node.table.totals() == Totals(0, 0)
    node.reserve(1, 10, 0.0).release()
    assert node.table.totals() == Totals(0, 0)
    assert node.table.ended() == 1


@pytest.mark.parametrize("requests", [1, 100])
def test_a_reservation_that_fails_half_way_changes_nothing(tmp_path: Path, requests: int) -> None:
    create_admission_table(tmp_path / "table", 2)
    table = AdmissionTable(tmp_path / "table", 0)

    def room(totals: Totals, of_tenant: Totals) -> bool:
        raise LookupError("what the engines can run is not known")

    with pytest.raises(LookupError):
        table.try_add(requests, 10, room)
    assert table.totals() == Totals(0, 0)
    assert table.try_add(requests, 10, lambda *_: True), "the lock was given back"


def test_growing_beyond_counter_range_keeps_reservation() -> None:
    node = admission(max_queue=4, max_queue_tokens=100)
    slot = node.reserve(1, 10, 0.0)
    with pytest.raises(Overloaded):
        slot.recount(2**70, 0.0)
    assert node.table.totals() == Totals(1, 10)
    slot.release()
    assert node.table.totals() == Totals(0, 0)
