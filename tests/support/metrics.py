"""Metrics of a running stack."""

import re

from tests.support.http import ADMIN_KEY, fetch
from tests.support.waiting import PATIENCE


def scrape(url: str, key: str = ADMIN_KEY) -> str:
    """Return the text of /metrics.

    Raises:
        ConnectionError: there was no answer.
    """
    status, text, _ = fetch(f"{url}/metrics", key=key, timeout=PATIENCE)
    if status == 0:
        raise ConnectionError(text)
    assert status == 200, text
    return text


def metric(
    url: str, name: str, *, prefix: str = "swell_", key: str = ADMIN_KEY
) -> dict[str, float]:
    """Return the values of a metric by engine, or by "" without that label.

    Samples that differ in other labels are summed.
    """
    found: dict[str, float] = {}
    pattern = rf"^{prefix}{name}(\{{[^}}]*\}})? (\S+)$"
    for labels, value in re.findall(pattern, scrape(url, key), re.MULTILINE):
        engine = re.search(r'engine="(\d+)"', labels)
        key = engine[1] if engine else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found


def total(url: str, name: str, *, prefix: str = "swell_") -> float:
    """Return the sum over all engines."""
    return sum(metric(url, name, prefix=prefix).values())


def num_running(url: str) -> float:
    """Return the number of sequences that the engines run."""
    return total(url, "num_requests_running")
