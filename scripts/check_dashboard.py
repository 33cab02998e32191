"""Runs every query of a Grafana dashboard against Prometheus and prints the results by panel.

    python scripts/check_dashboard.py grafana.json --set model_name=swell-shakespeare
    python scripts/check_dashboard.py grafana.json --prometheus http://monitoring:9090 --range 1h

Exits with status 1 if a query fails or returns no data.
"""

import argparse
import json
import math
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Query(NamedTuple):
    """One expression of a panel."""

    panel: str
    expression: str


class Finding(NamedTuple):
    """The result of a query."""

    query: Query
    values: list[float]
    """Finite values, one per series."""
    error: str | None = None


def queries_of(panels: Iterable[Mapping[str, Any]]) -> Iterator[Query]:
    """Yield the queries of panels, including panels inside rows."""
    for panel in panels:
        for target in panel.get("targets", ()):
            if "expr" in target:
                yield Query(panel.get("title", ""), target["expr"])
        yield from queries_of(panel.get("panels", ()))


def substitute(expression: str, variables: Mapping[str, str]) -> str:
    """Return an expression with Grafana's `$name` and `${name}` replaced by values.

    Raises:
        KeyError: a variable has no value.
    """

    def value(match: re.Match[str]) -> str:
        return variables[match[1] or match[2]]

    return re.sub(r"\$(?:\{(\w+)[^}]*\}|(\w+))", value, expression)


def ask(prometheus: str, query: Query, variables: Mapping[str, str]) -> Finding:
    """Evaluate a query at the current time."""
    try:
        expression = substitute(query.expression, variables)
        parameters = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(
            f"{prometheus}/api/v1/query?{parameters}", timeout=30
        ) as answer:
            result = json.load(answer)["data"]["result"]
    except KeyError as error:
        return Finding(query, [], f"no value for {error}")
    except urllib.error.HTTPError as error:
        with error:
            return Finding(query, [], error.read().decode())
    values = [float(series["value"][1]) for series in result]
    return Finding(query, [value for value in values if math.isfinite(value)])


def table(findings: Iterable[Finding]) -> Table:
    """Return the findings as a table."""
    shown = Table("panel", "query", "series", "largest")
    for query, values, error in findings:
        largest = f"{max(values):.4g}" if values else (error or "no data")
        shown.add_row(query.panel, " ".join(query.expression.split()), str(len(values)), largest)
    return shown


def main() -> None:
    """Check the dashboard given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("dashboard", type=Path, help="Grafana's JSON")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--range", default="5m", help="what the dashboard looks back over")
    parser.add_argument("--rate-interval", default="1m", help="what it takes rates over")
    options = parser.parse_args()
    try:
        settings = dict(pair.split("=", 1) for pair in options.set)
    except ValueError:
        parser.error("--set wants NAME=VALUE")
    intervals = {"__rate_interval": options.rate_interval, "__interval": options.rate_interval}
    variables = {**intervals, "__range": options.range, **settings}
    dashboard = json.loads(options.dashboard.read_text(encoding="utf-8"))
    queries = list(queries_of(dashboard["panels"]))
    findings = [ask(options.prometheus, query, variables) for query in queries]
    Console(width=max(100, Console().width)).print(table(findings))
    sys.exit(any(not finding.values for finding in findings))


if __name__ == "__main__":
    main()
