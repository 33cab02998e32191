"""Alerts and the autoscaler's query, evaluated by a real Prometheus over a failing stack."""

import re
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.deploy.prometheus import Prometheus
from tests.deploy.test_chart import CHART, scaled_object
from tests.support.commands import SWELL, swell
from tests.support.load import Load
from tests.support.ports import port_of_a_coordinator
from tests.support.waiting import until

pytestmark = pytest.mark.deploy

SLOTS, ENGINES, CLIENTS = 4, 3, 48
LABELS = {"namespace": "llm", "service": "demo-swell"}


def impatient_alerts() -> str:
    """Return the alerts with minutes replaced by seconds, to shorten the tests."""
    text = (CHART / "files" / "alerts.yaml").read_text(encoding="utf-8")
    text = re.sub(r"for: \d+m", "for: 2s", text)
    text = text.replace("[5m]", "[5s]").replace("offset 10m", "offset 10s")
    text = text.replace('missing_seconds{job=~".+"}) > 600', 'missing_seconds{job=~".+"}) > 2')
    return text.replace('silence_seconds{job=~".+"}) > 15', 'silence_seconds{job=~".+"}) > 6')


def test_faults_of_a_stack_are_reported_and_its_work_is_measured(tmp_path: Path) -> None:
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
        until(lambda: prometheus.firing() == {}, "no alert fires", interval=0.5)

        def fires(alert: str, about: str = "", *, ends: bool = False) -> None:
            until(
                lambda: (about in prometheus.firing().get(alert, set())) is not ends,
                f"{alert} {'ends' if ends else 'fires'}", interval=0.5,
            )  # fmt: skip

        with Load(url, CLIENTS).running() as load:
            began = time.monotonic()
            # The load, in hundredths of an engine.
            prometheus.wait(f"({query['query']}) > {70 * CLIENTS / SLOTS}")
            assert prometheus.value(query["query"]) <= 100 * CLIENTS / SLOTS
            signalled = time.monotonic() - began
            fires("SwellQueueSteady")
            engines[0].kill()
            began = time.monotonic()
            prometheus.wait("swell_engines_ready == 2")
            seen = time.monotonic() - began
            load.goes_on()
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
        load.check()
        assert len(load.answers) == CLIENTS
        fires("SwellQueueSteady", ends=True)
        prometheus.wait(f"({query['query']}) == bool 0")
        for each in engines[1:]:
            each.send_signal(signal.SIGKILL)
        fires("SwellEngineMissing", "1 silent")
    print(
        f"{load.count} answers, none failed or wrong; the autoscaler's query told of the load "
        f"after {signalled:.1f} s, Prometheus of the lost engine after {seen:.1f} s"
    )
