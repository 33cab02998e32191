"""The exit code of a benchmark."""

from types import SimpleNamespace

import pytest

from server.bench import command
from server.bench.config import BenchConfig
from server.bench.summary import Record
from tests.server.bench.test_summary import record


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([record(0), record(1)], 0),
        ([record(0), record(1, error="http_503", status=503)], 1),
        ([record(0, error="http_404", status=404)], 1),
        ([record(0), record(1, error="cut_off", status=200)], 0),
        ([record(0, error="cut_off", status=200)], 1),
    ],
)
def test_a_benchmark_with_failed_requests_fails(
    monkeypatch: pytest.MonkeyPatch, records: list[Record], code: int
) -> None:
    progress = SimpleNamespace(records=records, costs=[])
    monkeypatch.setattr(command, "_run", lambda *_: progress)
    monkeypatch.setattr(command, "_print", lambda *_: None)
    assert command.bench(BenchConfig()) == code
