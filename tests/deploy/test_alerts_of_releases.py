"""Alerts of several releases in one Prometheus: each covers only its own release."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_chart import CHART, find, helm, read

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

CASES = yaml.load(  # keeps values such as 0x120 as strings
    Path(__file__).with_name("alerts_test.yaml").read_text(encoding="utf-8"), yaml.BaseLoader
)
HEALTHY = "a healthy stack under load, seen by two front ends; nothing fires"
SICK = ("llm", "one-swell")
WELL = (("llm", "two-swell"), ("other", "two-swell"))
TROUBLES = [
    (case, check)
    for case in CASES["tests"]
    for check in case["alert_rule_test"]
    if check["exp_alerts"]
]


def rules_of(tmp_path: Path, namespace: str, service: str) -> Path:
    """Write the rules that the chart renders for a release."""
    done = helm(
        "template", service.removesuffix("-swell"), str(CHART), "--namespace", namespace,
        "--kube-version", "1.30.0", "--set", "metrics.prometheusRule.enabled=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rule = find(read(done.stdout), "PrometheusRule", service)
    file = tmp_path / f"{namespace}-{service}.yaml"
    file.write_text(yaml.safe_dump(rule["spec"]), encoding="utf-8")
    return file


def series_of(
    case: dict[str, Any], namespace: str, service: str, values: int = 0
) -> list[dict[str, str]]:
    """Return a case's series with a release's labels; a healthy one has this many values."""
    return [
        {
            "series": each["series"].replace(
                "{", f'{{namespace="{namespace}", service="{service}", ', 1
            ),
            "values": re.sub(r"x120$", f"x{values}", each["values"]),
        }
        for each in case["input_series"]
    ]


def test_alerts_of_two_releases_do_not_interfere(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    (healthy,) = (case for case in CASES["tests"] if case["name"] == HEALTHY)
    firing = 'count by (namespace, service) (ALERTS{{alertname="{}", alertstate="firing"}})'
    namespace, service = SICK
    tests = []
    for case, check in TROUBLES:
        steps = 2 * int(check["eval_time"].removesuffix("m")) + 10
        well = [series for release in WELL for series in series_of(healthy, *release, steps)]
        tests.append({
            "name": f"{check['alertname']} of one release beside two that are well",
            "interval": case["interval"],
            "input_series": [*well, *series_of(case, *SICK)],
            "promql_expr_test": [{
                "expr": firing.format(check["alertname"]),
                "eval_time": check["eval_time"],
                "exp_samples": [{
                    "labels": f'{{namespace="{namespace}", service="{service}"}}',
                    "value": len(check["exp_alerts"]),
                }],
            }],
        })  # fmt: skip
    text = (CHART / "files" / "alerts.yaml").read_text(encoding="utf-8")
    assert {check["alertname"] for _, check in TROUBLES} == set(re.findall(r"alert: (\w+)", text))
    file = tmp_path / "tests.yaml"
    rules = [str(rules_of(tmp_path, *release)) for release in (SICK, *WELL)]
    content = {"rule_files": rules, "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
