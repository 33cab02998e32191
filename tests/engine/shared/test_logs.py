"""Log lines for people and for machines."""

import json
import logging
import subprocess
import sys

import pytest
from rich.console import Console

from engine.shared.logs import JsonFormatter, LogLines, TextFormatter, relay_line

PROGRAM = """
import logging, sys
from engine.shared.logs import name_process
name_process("api 3", "info", sys.argv[1])
logger = logging.getLogger("some.module")
logger.debug("not shown")
logger.info("request %s came", "abc", extra={"request_id": "abc", "path": b"raw"})
try:
    raise ValueError("bad\\nluck")
except ValueError:
    logger.exception("it failed")
"""


def run(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_lines_have_their_process_and_the_fields_that_callers_add() -> None:
    first, second = map(json.loads, run("json"))
    assert first.pop("time").endswith("Z")
    assert first.pop("path")
    assert first == {
        "level": "info",
        "process": "api 3",
        "logger": "some.module",
        "message": "request abc came",
        "request_id": "abc",
    }
    assert second["level"] == "error"
    assert "ValueError: bad\nluck" in second["exception"]


def test_text_lines_are_human_readable() -> None:
    lines = run("text")
    assert lines[0].endswith("INFO    [api 3] request abc came")
    assert any(line.startswith("Traceback") for line in lines)


def test_extra_fields_replace_no_standard_fields() -> None:
    record = logging.makeLogRecord({"msg": "real", "name": "x", "level": "forged"})
    assert json.loads(JsonFormatter("p").format(record))["level"] != "forged"


def test_console_output_becomes_log_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    console = Console(file=LogLines(logging.getLogger("console")))
    console.print("[bold green]swell is ready[/] after 1.2 s", highlight=False, soft_wrap=True)
    console.print("stopping")
    assert [record.getMessage() for record in caplog.records] == [
        "swell is ready after 1.2 s",
        "stopping",
    ]


def test_lines_of_children_are_relayed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    relay_line("engine 0", "text", "plain")
    relay_line("engine 0", "json", '{"level": "info"}')
    assert capsys.readouterr().err == 'plain\n{"level": "info"}\n'
    relay_line("engine 0", "json", "Segmentation fault")
    (record,) = caplog.records
    assert record.getMessage() == "Segmentation fault"
    assert record.source == "engine 0"  # type: ignore[attr-defined]


def test_a_quoted_name_cannot_look_like_another_record() -> None:
    name = "x\n12:00:00.000 ERROR   [engine 0] forged\r\x1b[31m\0\u2028\u202e"
    record = logging.makeLogRecord({"msg": "adapter %s\tis gone", "args": (name,)})
    first, second = TextFormatter("p").format(record).split("\n")
    assert first.endswith("[p] adapter x")
    assert second.startswith(" ")
    assert second.endswith("forged\\r\\x1b[31m\\x00\\u2028\\u202e\tis gone")


def test_an_exception_is_shown_as_it_is() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    lines = TextFormatter("p").format(record).splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: wrong"
