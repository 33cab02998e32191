"""Probes are answered from the main loop's last report."""

import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import pytest

from engine.core.watchdog import StepWatch
from engine.probe import main, probe
from engine.shared.config import HealthConfig
from engine.shared.health import Health, HealthStatus, serve_health
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answers(health: Health) -> tuple[int, int]:
    return health.answer("/health").status, health.answer("/ready").status


def test_starting_process_is_alive_but_not_ready() -> None:
    clock = Clock()
    health = Health(60.0, clock)
    clock.now += 1000
    assert answers(health) == (200, 503)


def test_process_is_ready_while_loop_runs_and_unhealthy_when_stalled() -> None:
    clock = Clock()
    health = Health(60.0, clock)
    health.ready()
    assert answers(health) == (200, 200)
    clock.now += 61
    assert answers(health) == (503, 503)
    health.record_iteration()
    assert answers(health) == (200, 200)


def test_an_engine_is_healthy_in_a_step_that_step_timeout_allows() -> None:
    clock = Clock()
    watch = StepWatch(step_timeout=100.0)
    health = Health(60.0, clock, watch.is_within_budget)
    health.ready()
    watch.begin(2048, clock.now)  # one of the first: five times twice as long
    clock.now += 999
    assert answers(health) == (200, 200)
    clock.now += 2
    assert answers(health) == (503, 503)
    watch.end()
    assert answers(health) == (503, 503), "it hangs elsewhere"


def test_draining_process_is_alive_but_not_ready() -> None:
    health = Health(60.0)
    health.ready()
    health.drain()
    assert answers(health) == (200, 503)
    assert health.answer("/ready").body == "draining"


def test_health_is_served_over_http_and_to_the_probe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health, port = Health(60.0), free_port()
    stop = serve_health(HealthConfig(health_port=port), health)
    monkeypatch.setenv("SWELL_HEALTH_PORT", str(port))
    assert main(["SWELL_HEALTH_PORT", "/health"]) == 0
    assert main(["SWELL_HEALTH_PORT", "/ready"]) == 1
    health.ready()
    assert main(["SWELL_HEALTH_PORT", "/ready"]) == 0
    assert capsys.readouterr().out.split() == ["starting", "starting", "ready"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE)
    caught.value.close()
    assert caught.value.code == 404
    stop()
    assert main(["SWELL_HEALTH_PORT", "/health"]) == 1


def test_disconnecting_probe_logs_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    health, port = Health(60.0), free_port()
    asked, hung_up = threading.Event(), threading.Event()

    def answer(path: str) -> HealthStatus:
        asked.set()
        hung_up.wait(PATIENCE)
        return HealthStatus(200, "ready" * 100_000)

    monkeypatch.setattr(health, "answer", answer)
    stop = serve_health(HealthConfig(health_port=port), health)
    idle = threading.active_count()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert asked.wait(PATIENCE)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    hung_up.set()
    until(lambda: threading.active_count() <= idle, "the request is over")
    stop()
    assert "Traceback" not in capfd.readouterr().err


def test_probe_prints_reason_without_answer() -> None:
    began = time.monotonic()
    healthy, text = probe(free_port(), "/health", tls=False)
    assert not healthy
    assert "refused" in text
    assert time.monotonic() - began < PATIENCE


def test_health_port_in_use_is_an_error() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        with pytest.raises(OSError, match="in use"):
            serve_health(HealthConfig(health_port=listener.getsockname()[1]), Health(60.0))
