"""Alerts and the autoscaler's query, by a real Prometheus over a stack that gets into trouble."""

import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.deploy.prometheus import Prometheus
from tests.deploy.test_chart import CHART, scaled_object
from tests.support.commands import SWELL, swell
from tests.support.http import completion, fetch
from tests.support.ports import port_of_a_coordinator
from tests.support.waiting import until

pytestmark = pytest.mark.deploy

SLOTS, ENGINES, CLIENTS = 4, 3, 48
LABELS = {"namespace": "llm", "service": "demo-swell"}


def impatient_alerts() -> str:
    """Return the alerts with seconds for minutes, so that a test need not wait for them."""
    text = (CHART / "files" / "alerts.yaml").read_text(encoding="utf-8")
    text = re.sub(r"for: \d+m", "for: 2s", text)
    text = text.replace("[5m]", "[5s]").replace("offset 10m", "offset 10s")
    text = text.replace('missing_seconds{job=~".+"}) > 600', 'missing_seconds{job=~".+"}) > 2')
    return text.replace('silence_seconds{job=~".+"}) > 15', 'silence_seconds{job=~".+"}) > 6')


@contextmanager
def load(url: str) -> Iterator[list[str]]:
    """Have clients ask all the while; yields what failed."""
    over = threading.Event()
    failures: list[str] = []

    def ask(number: int) -> None:
        while not over.is_set():
            answer = fetch(f"{url}/v1/completions", completion(f"Act {number}", 60))
            if answer.status != 200:
                failures.append(repr(answer))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def test_troubles_of_a_stack_are_told_and_its_work_is_measured(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    key = tmp_path / "key"
    key.write_text("a secret of these tests")
    join = (
        "--coordinator", f"127.0.0.1:{port_of_a_coordinator()}", "--cluster-key-file", str(key),
        "--engine-timeout", "3",
    )  # fmt: skip

    def coordinate(stack: ExitStack) -> ExitStack:
        own = stack.enter_context(ExitStack())
        own.enter_context(swell("coordinator", *join, "--expected-engines", str(ENGINES)))
        return own

    def engine(stack: ExitStack, rank: int) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [
                SWELL, "engine", *join, "--executor", "simulated", "--simulated-step-us", "20000",
                "--max-num-seqs", str(SLOTS), "--data-parallel-rank", str(rank),
            ],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    query = scaled_object(f"engine.env.SWELL_MAX_NUM_SEQS={SLOTS}")["triggers"][0]["metadata"]
    with ExitStack() as running:
        coordinator = coordinate(running)
        engines = [engine(running, rank) for rank in range(ENGINES)]
        front = RunningStack(
            *join, "--api-server-count", "2", "--min-ready-engines", str(ENGINES),
            command="api-server",
        )  # fmt: skip
        url = running.enter_context(front).url
        prometheus = Prometheus(
            tmp_path, url.removeprefix("http://"), labels=LABELS, rules=impatient_alerts()
        )
        running.callback(prometheus.stop)
        prometheus.wait("swell_engines_ready == 3")
        until(lambda: prometheus.firing() == {}, "no alert fires", within=40.0, interval=0.5)

        def fires(alert: str, about: str = "", *, ends: bool = False) -> None:
            until(
                lambda: (about in prometheus.firing().get(alert, set())) is not ends,
                f"{alert} {'ends' if ends else 'fires'}", within=40.0, interval=0.5,
            )  # fmt: skip

        with load(url) as failures:
            # The work there is, in engines that it would fill: KEDA asks for as many at 100 %.
            prometheus.wait(f"({query['query']}) > {0.7 * CLIENTS / SLOTS}")
            assert prometheus.value(query["query"]) <= CLIENTS / SLOTS
            fires("SwellQueueSteady")
            engines[0].kill()
            fires("SwellEngineMissing", "0 silent")
            fires("SwellFewEngines")
            coordinator.close()
            fires("SwellCoordinatorLost")
            coordinate(running)
            fires("SwellCoordinatorLost", ends=True)
            fires("SwellEngineMissing", "0 not_joined")
            engine(running, 0)
            fires("SwellFewEngines", ends=True)
            fires("SwellEngineMissing", "0 not_joined", ends=True)
        assert failures == []
        fires("SwellQueueSteady", ends=True)
        prometheus.wait(f"({query['query']}) == bool 0")
        for each in engines[1:]:
            each.send_signal(signal.SIGKILL)
        fires("SwellEngineMissing", "1 silent")
