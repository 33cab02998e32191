"""`swell bench` against Swell's own application."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server import cli
from tests.support.commands import SWELL
from tests.support.waiting import until

GUARD_SECONDS = 90
INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""A program that runs a command with default interrupt handling."""
TIMER_SECONDS = 0.002
"""Seconds by which the event loop's millisecond timers can be early."""


Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bench(app: Any, served: Any, tmp_path: Path) -> Bench:
    """Return a function that runs `swell bench`; it returns the exit code and the result file."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "result.json"
        with served(app) as url:
            code = cli.main(["bench", "--url", url, "--output", str(output), *flags])
        return code, json.loads(output.read_text())

    return run


def test_a_closed_loop_counts_every_request_and_token(
    bench: Bench, engines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.script = engines.tokens([65, 66, 67, 68] * 50)
    plot = tmp_path / "plot.png"
    code, result = bench(
        "--num-prompts", "40", "--num-warmups", "3",
        "--max-concurrency", "6", "--processes", "2", "--random-input-len", "12",
        "--random-output-len", "9", "--goodput", "ttft:60000", "--save-detailed",
        "--plot", str(plot),
    )  # fmt: skip
    assert code == 0
    assert (result["completed"], result["failed"], result["errors"]) == (40, 0, {})
    assert result["model_id"] == "tiny"
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40 * 12, 40 * 9)
    assert 1 <= result["max_concurrent_requests"] <= 6
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for name in ("ttft", "e2el"):
        assert 0 < result[f"median_{name}_ms"] <= result[f"p99_{name}_ms"]
    # The fake engine produces all tokens at once, so all can arrive with the first.
    assert 0 <= result["median_tpot_ms"] <= result["p99_tpot_ms"]
    assert [request["index"] for request in result["requests"]] == list(range(40))
    assert {request["finish_reason"] for request in result["requests"]} == {"length"}
    assert len(result["client"]["processes"]) == 2
    assert len(engines.streams) == 43
    assert {len(stream.prompt_token_ids) for stream in engines.streams} == {12}
    assert len({tuple(stream.prompt_token_ids) for stream in engines.streams}) == 43
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "requests completed" in printed
    assert "CPU in 2 process(es)" in printed


def test_open_loop_sends_at_its_rate_regardless_of_answers(bench: Bench) -> None:
    code, result = bench(
        "--backend", "openai-chat", "--num-prompts", "30",
        "--request-rate", "60", "--random-input-len", "5", "--random-output-len", "4",
        "--save-detailed", "--processes", "2",
    )  # fmt: skip
    assert code == 0
    assert result["completed"] == 30
    assert result["duration"] >= 0.5
    due = [request["scheduled"] for request in result["requests"]]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(0.5)
    early = [request["scheduled"] - request["started"] for request in result["requests"]]
    assert max(early) < TIMER_SECONDS
    assert result["client"]["schedule_delay_ms"]["count"] == 30


def test_refusals_are_counted_by_kind(bench: Bench, engines: Any) -> None:
    engines.refuse_from = 2 + 5
    code, result = bench(
        "--num-prompts", "8", "--num-warmups", "2",
        "--max-concurrency", "1", "--random-input-len", "3", "--no-stream",
    )  # fmt: skip
    assert code == 1
    assert (result["completed"], result["errors"]) == (5, {"http_503": 3})
    assert "median_ttft_ms" not in result
    assert result["median_e2el_ms"] > 0


def test_endless_answer_is_cut_off(bench: Bench, engines: Any) -> None:
    endless, begun = engines.tokens([65]), len(engines.streams)

    def script(stream: Any) -> list[Any]:
        outputs: list[Any] = endless(stream)
        return outputs[: 0 if len(engines.streams) > begun + 1 else None]

    engines.script = script
    code, result = bench(
        "--num-prompts", "9", "--num-warmups", "1",
        "--max-concurrency", "2", "--random-input-len", "3", "--time-limit", "3",
    )  # fmt: skip
    assert code == 1
    assert (result["completed"], result["errors"]) == (0, {"cut_off": 2})


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_shows_partial_results(
    app: Any, engines: Any, served: Any, signum: signal.Signals
) -> None:
    answer, answered = engines.tokens([65]), 1 + 4
    engines.script = lambda stream: answer(stream) if len(engines.streams) <= answered else []
    with served(app) as url:
        process = subprocess.Popen(
            [
                # Shells make background jobs ignore interrupts, which children inherit.
                sys.executable, "-c", INTERRUPTIBLE, SWELL, "bench", "--url", url,
                "--num-prompts", "9", "--num-warmups", "1", "--max-concurrency", "2",
                "--random-input-len", "3",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until(lambda: len(engines.streams) >= answered + 2, "all that are sent", GUARD_SECONDS)
        process.send_signal(signum)
        printed, complained = process.communicate(timeout=GUARD_SECONDS)
    assert process.returncode == 0
    assert re.search(r"requests completed\D+4\b", printed)
    assert re.search(r"requests not sent\D+3\b", printed)
    assert re.search(r"cut_off\D+2\b", printed)
    assert complained == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--goodput", "speed:1"], "speed:1"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--extra-body", '{"stream": false}'], "cannot set stream"),
        (["--extra-body", '{"temperature": -1}'], "every request of the warm-up failed: http_400"),
        (["--model", "absent"], "404"),
        (["--header", "novalue"], "NAME=VALUE"),
        (["--output", "/dev/null/x.json"], "/dev/null/x.json"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
    ],
)
def test_unrunnable_benchmark_reports_reason(
    app: Any, served: Any, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with served(app) as url:
        assert cli.main(["bench", "--url", url, "--num-prompts", "2", *flags]) == 1
    assert said in capsys.readouterr().err
