"""Alerts over series recorded on a real stack: which fire in each of its states.

`record_alerts.py` made the recordings; a second of theirs is told as thirty. The cases at the
bounds, with series made up for them, are in `alerts_test.yaml`.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.record_alerts import STATES
from tests.deploy.recording import ALERTS, FOLDER, STRETCH, Recorded
from tests.deploy.test_chart import scaled_object
from tests.deploy.test_dashboards import ALERTS as FILE
from tests.deploy.test_dashboards import promtool

pytestmark = pytest.mark.deploy

FIRING = 'count by (alertname, engine, reason) (ALERTS{alertstate="firing"})'
EXPECTED: dict[str, dict[str, set[str]]] = {
    "healthy": {"end": set()},
    "lost": {
        "healthy": set(),
        "one lost": {"SwellEngineMissing 0 silent", "SwellFewEngines"},
        "all lost": {"SwellEngineMissing 0 silent", "SwellFewEngines", "SwellNoEngine"},
    },
    "absent": {"end": {
        "SwellEngineMissing 2 drained", "SwellEngineMissing 3 not_joined", "SwellFewEngines",
    }},
    "loading": {"end": {"SwellEngineStartsSlowly 1", "SwellFewEngines"}},
    "refused": {"end": {"SwellEngineMissing 1 refused", "SwellFewEngines"}},
    "unreadable": {"end": {"SwellEngineMissing 1 died", "SwellFewEngines"}},
    "unheard": {"healthy": set(), "lost": {"SwellCoordinatorLost"}, "back": set()},
    "queue": {
        "healthy": set(),
        "grown": {"SwellQueueGrowth", "SwellTTFTBurnFast"},
        "steady": {"SwellQueueSteady", "SwellTTFTBurnFast", "SwellTTFTBurnSlow"},
    },
    "refusing": {"end": {"SwellRefusing"}},
    "memory": {"end": {"SwellKVCacheFull 0"}},
    "hang": {"end": {"SwellStatsStale 1"}},
    "paused": {"end": set()},
    "dying": {
        "healthy": set(),
        "end": {"SwellAnswersCutOff", "SwellEngineRestarting 0", "SwellServerErrors"},
    },
    "draining": {"healthy": set(), "end": {"SwellEngineDown 1", "SwellFewEngines"}},
    "api_dying": {"healthy": set(), "end": {"SwellApiServerRestarting - died"}},
    "unkept": {"healthy": set(), "end": {"SwellResponsesNotKept"}},
    "cold": {"healthy": set(), "end": {"SwellColdStartSlow"}},
    "unscraped": {"healthy": set(), "end": {"SwellNotScraped"}},
}  # fmt: skip
"""All alerts that fire, with the engine (-: none) and the reason, by state and mark."""


def sample(told: str) -> dict[str, object]:
    """Return a firing alert in the form in which promtool reports the result of a query."""
    names = ("alertname", "engine", "reason")
    given = zip(names, told.split(), strict=False)
    labels = ", ".join(f'{name}="{value}"' for name, value in given if value != "-")
    return {"labels": f"{{{labels}}}", "value": 1}


def case(name: str, series: dict[str, str], expected: dict[int, set[str]]) -> dict[str, Any]:
    """Return a promtool test case: which alerts fire at which samples."""
    return {
        "name": name,
        "interval": f"{STRETCH}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": FIRING,
                "eval_time": f"{at * STRETCH}s",
                "exp_samples": [sample(told) for told in sorted(alerts)],
            }
            for at, alerts in expected.items()
        ],
    }


def test_every_state_is_recorded() -> None:
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(STATES) == set(EXPECTED)


def test_each_state_fires_exactly_its_alerts(tmp_path: Path) -> None:
    cases = []
    for state, expected in EXPECTED.items():
        recorded = Recorded.read(state)
        assert set(recorded.marks) == set(expected)
        at = {int(recorded.marks[mark]): alerts for mark, alerts in expected.items()}
        cases.append(case(f"{state}: {recorded.story}", recorded.series, at))
    # What a paused engine shows, but that it was asked to: no stack does it by itself.
    paused = Recorded.read("paused")
    unasked = {
        name: values
        for name, values in paused.series.items()
        if not name.startswith("swell_engine_halted")
    }
    end = int(paused.marks["end"])
    cases.append(case("halted unasked", unasked, {end: {"SwellEngineHangs 1"}}))
    tests = tmp_path / "tests.json"  # JSON is YAML
    tests.write_text(json.dumps({
        "rule_files": [str(FILE)], "evaluation_interval": f"{STRETCH}s", "tests": cases,
    }), encoding="utf-8")  # fmt: skip
    assert "SUCCESS" in promtool("test", "rules", str(tests))


def test_every_alert_fires_on_recorded_faults_and_not_otherwise() -> None:
    names = {
        rule["alert"]
        for group in yaml.safe_load(ALERTS)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    by_mark = [(mark, alerts) for marks in EXPECTED.values() for mark, alerts in marks.items()]
    fired = {told.split()[0] for _, alerts in by_mark for told in alerts}
    assert fired == names - {"SwellEngineHangs"}, "but the one over what is left out of `paused`"
    assert not any(alerts for mark, alerts in by_mark if mark == "healthy")


def test_labels_in_queries_exist_on_series_of_real_stack() -> None:
    series = {name for state in STATES for name in Recorded.read(state).series}
    keda = scaled_object()["triggers"][0]["metadata"]["query"]
    asked = set(re.findall(r"\b(swell_\w+)\{([^}]*)\}", ALERTS + keda))
    assert len(asked) > 15
    given_by_prometheus = {"job", "namespace", "service"}
    for metric, selector in asked:
        matchers = [
            (label, equal, value)
            for label, equal, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector)
            if label not in given_by_prometheus
        ]
        labels = [
            dict(re.findall(r'(\w+)="([^"]*)"', name))
            for name in series
            if name.startswith(f"{metric}{{")
        ]
        assert any(
            all(
                re.fullmatch(value if equal == "=~" else re.escape(value), each.get(label, ""))
                for label, equal, value in matchers
            )
            for each in labels
        ), (metric, selector)
