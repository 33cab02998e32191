"""The dashboard and the alert rules are well-formed, up to date, and accepted by promtool."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.write_dashboard import TARGET, render

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parent.parent.parent
ALERTS = ROOT / "helm" / "swell" / "files" / "alerts.yaml"
DASHBOARD: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dashboard_file_equals_script_output() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run scripts/write_dashboard.py"


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alert_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))


def test_alerts_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    source = Path(__file__).with_name("alerts_test.yaml").read_text(encoding="utf-8")
    tests = tmp_path / "tests.yaml"
    tests.write_text(source.replace("[RULES]", f"[{ALERTS}]"), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(tests))


def test_prometheus_of_the_compose_file_reads_its_configuration(tmp_path: Path) -> None:
    source = (ROOT / "docker" / "prometheus.yml").read_text(encoding="utf-8")
    configured = tmp_path / "prometheus.yml"
    key = tmp_path / "metrics.key"
    key.touch()
    for there, here in (("/etc/swell/alerts.yaml", ALERTS), ("/run/swell/metrics.key", key)):
        assert there in source
        source = source.replace(there, str(here))
    configured.write_text(source, encoding="utf-8")
    assert "SUCCESS" in promtool("check", "config", str(configured))


def test_every_alert_has_firing_and_silent_tests_and_instructions() -> None:
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    alerts = {
        rule["alert"]: rule
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    source = Path(__file__).with_name("alerts_test.yaml").read_text(encoding="utf-8")
    fires: set[str] = set()
    silent: set[str] = set()
    for each in yaml.safe_load(source.replace("[RULES]", "[]"))["tests"]:
        for test in each.get("alert_rule_test", ()):
            (fires if test["exp_alerts"] else silent).add(test["alertname"])
    assert fires == silent == set(alerts)
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = {line[3:] for line in runbook.splitlines() if line.startswith("## ")}
    assert set(alerts) <= sections
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("warning", "critical")
        told = rule["annotations"]
        assert told["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert told["summary"]
        assert told["description"]
