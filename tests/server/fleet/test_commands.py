"""Engines in the output of `swell status`, from the server's two endpoints."""

from typing import Any

import pytest

from server.config.tools import StatusConfig, StatusTarget
from server.fleet.commands import _summary, engine_rows, status

COUNTS = {"running": 3, "waiting": 1, "kv_usage": 0.25}


def engine(rank: int, **more: object) -> dict[str, Any]:
    known = {"rank": rank, "host": "here", "ready": True, "halted": False, "restarts": 0}
    return {**known, "counts": COUNTS, **more}


def fleet(engines: dict[str, str], **more: object) -> dict[str, Any]:
    return {"data_parallel_size": 2, "engines": engines, "nodes": {}, "error": None, **more}


def test_status_of_ray_engines_shows_nodes_and_wait_reasons() -> None:
    cluster = {"engines": [engine(0), engine(1, restarts=2)]}
    phases = {"0": "ready", "1": "retiring", "2": "waiting for 1 GPU"}
    hosts = {"0": "10.0.0.1", "1": "10.0.0.2"}
    assert engine_rows(cluster, fleet(phases, hosts=hosts)) == [
        ("0", "10.0.0.1", "ready", "3", "1", "25%", "0"),
        ("1", "10.0.0.2", "retiring", "3", "1", "25%", "2"),
        ("2", "-", "waiting for 1 GPU", "-", "-", "-", "-"),
    ]


def test_status_without_admin_key_lists_joined_engines() -> None:
    cluster = {"engines": [engine(0, ready=False, counts=None), engine(1, halted=True)]}
    assert engine_rows(cluster, None) == [
        ("0", "here", "joined", "-", "-", "-", "0"),
        ("1", "here", "halted", "3", "1", "25%", "0"),
    ]


def test_status_shows_missing_engines_by_node() -> None:
    phases = {"a/0": "ready", "b/0": "importing torch"}
    rows = engine_rows({"engines": [engine(0)]}, fleet(phases, nodes={"a": {}, "b": {}}))
    assert [row[:3] for row in rows] == [("0", "here", "ready"), ("-", "b/0", "importing torch")]


def test_summary_counts_waiting_engines_by_missing_part() -> None:
    cluster = {"version": "1", "models": ["m"], "num_front_ends": 1, "engines": [engine(0)]}
    phases = {"0": "ready", "1": "waiting for 1 GPU", "2": "waiting for 1 GPU"}
    status = fleet(phases, hosts={}, waiting={"1": "GPU", "2": "GPU"})
    rows = engine_rows(cluster, status)
    assert _summary(cluster, status, rows).endswith(
        "1 of 2 engines ready, 1 API servers, 2 wait for GPU"
    )


@pytest.mark.slow  # it opens a socket
def test_a_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(StatusConfig(status=StatusTarget(url="http://127.0.0.1:9"))) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
