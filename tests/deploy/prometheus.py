"""A real Prometheus that scrapes a stack."""

import json
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from scripts.check_dashboard import Query, ask
from tests.support.http import fetch
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until


class Prometheus:
    """A real Prometheus that scrapes a stack every second.

    Args:
        targets: HOST:PORT of its API servers.
        labels: labels added to all series, as by a ServiceMonitor.
        rules: content of a rules file, evaluated every second.
        variables: values of the variables in expressions.
        scrape: additional fields of the scrape configuration.
    """

    def __init__(
        self,
        folder: Path,
        *targets: str,
        labels: Mapping[str, str] = {},
        rules: str = "groups: []",
        variables: Mapping[str, str] = {},
        scrape: Mapping[str, object] = {},
    ) -> None:
        self._variables = variables
        (folder / "rules.yaml").write_text(rules, encoding="utf-8")
        self.url = f"http://127.0.0.1:{free_port()}"
        configuration = folder / "prometheus.yml"
        scraped = {
            "job_name": "swell",
            "static_configs": [{"targets": list(targets), "labels": dict(labels)}],
            **scrape,
        }  # fmt: skip
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [scraped], "rule_files": [str(folder / "rules.yaml")],
        }  # fmt: skip
        configuration.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        # Until it is ready, it answers queries with 503.
        until(lambda: fetch(f"{self.url}/-/ready").status == 200, "Prometheus runs", interval=0.1)

    def value(self, expression: str) -> float:
        """Return the only value of an expression; nan if it has none."""
        finding = ask(self.url, Query("", expression), self._variables)
        assert finding.error is None, finding.error
        return finding.values[0] if finding.values else float("nan")

    def wait(self, expression: str, within: float = PATIENCE) -> None:
        """Wait until an expression has a value above zero."""

        def is_positive() -> bool:
            try:
                return self.value(expression) > 0
            except OSError:
                return False  # too busy to answer in time

        until(is_positive, expression, within, interval=0.2)

    def firing(self) -> dict[str, set[str]]:
        """Return the firing alerts, each with its engines and reasons, if any."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=PATIENCE) as answer:
            alerts = json.load(answer)["data"]["alerts"]
        found: dict[str, set[str]] = {}
        for alert in alerts:
            if alert["state"] == "firing":
                labels = alert["labels"]
                about = " ".join(labels[name] for name in ("engine", "reason") if name in labels)
                found.setdefault(labels["alertname"], set()).add(about)
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
