"""The paths that the chart opens to clients."""

from typing import Any

import yaml

from scripts.write_docs import ROOT

OPERATORS = ("/docs", "/openapi.json", "/metrics", "/status", "/admin/", "/server_info", "/load")
"""Prefixes of paths that the chart's Ingress and route do not expose."""


def test_chart_publishes_exactly_the_client_paths(app: Any) -> None:
    text = (ROOT / "helm" / "swell" / "values.yaml").read_text(encoding="utf-8")
    published = yaml.safe_load(text)["api"]["publicPaths"]
    for route in app.routes:
        is_page = route.path == "/" or route.path.endswith((".js", ".css"))
        opened = any(f"{route.path}/".startswith(f"{each}/") for each in published)
        assert opened is not (is_page or route.path.startswith(OPERATORS)), route.path
