"""The usage report: its contents, and what it must not contain."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.shared import settings
from engine.shared.config import BUNDLED_MODEL
from server.config import ServeConfig
from server.fleet.usage_report import UsageReport, begin_usage_report, end_usage_report
from tests.support.commands import run_swell

DOC = Path(__file__).parents[3] / "docs" / "deploy-reference.md"


def config(path: Path | None, **flags: Any) -> ServeConfig:
    given = {} if path is None else {"usage_report": str(path)}
    return settings.load(ServeConfig, {**given, **flags}, {})


def test_no_usage_report_by_default(tmp_path: Path) -> None:
    assert begin_usage_report(config(None), BUNDLED_MODEL) is None
    end_usage_report(config(None), None, 0)


def test_usage_report_exists_from_start_and_records_exit(tmp_path: Path) -> None:
    wanted = config(tmp_path / "new" / "usage.json", max_num_seqs=7)
    report = begin_usage_report(wanted, BUNDLED_MODEL)
    found = json.loads((tmp_path / "new" / "usage.json").read_text())
    assert (
        found["architecture"]
        == json.loads((BUNDLED_MODEL / "config.json").read_text())["architectures"][0]
    )
    assert (found["settings"]["max_num_seqs"], found["ended_at"]) == (7, None)
    end_usage_report(wanted, report, 3)
    ended = json.loads((tmp_path / "new" / "usage.json").read_text())
    assert ended["exit_code"] == 3
    assert ended["ended_at"] >= ended["started_at"] == found["started_at"]


def test_usage_report_contains_no_names_paths_or_keys(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    words = {"api_key": ["sesame"], "served_model_name": ["tulip"], "socket_dir": "/tmp/daisy"}
    begin_usage_report(config(path, dtype="bfloat16", **words), BUNDLED_MODEL)
    text = path.read_text()
    assert not any(word in text for word in ("sesame", "tulip", "daisy", str(BUNDLED_MODEL)))
    assert json.loads(text)["settings"] == {
        "api_key": True,
        "dtype": "bfloat16",
        "served_model_name": True,
        "socket_dir": True,
        "usage_report": True,
    }


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    done = run_swell("serve", "--executor", "simulated", "--usage-report", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path} is a directory" in done.stderr


@pytest.mark.parametrize("field", [each.name for each in msgspec.structs.fields(UsageReport)])
def test_every_field_is_documented(field: str) -> None:
    [section] = [each for each in DOC.read_text().split("\n## ") if each.startswith("Usage report")]
    assert f"`{field}`" in section
