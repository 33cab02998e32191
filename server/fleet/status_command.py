"""`swell status`: the engines of a running server, with their nodes and states, once."""

import json
import sys
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from server.fleet.status_config import StatusConfig, StatusTarget

NOT_TOLD = "-"


def status(config: StatusConfig) -> int:
    """Ask the server, print a table and return the exit code; 0 if every engine serves."""
    target = config.status
    try:
        cluster = _get(target, "/status.json")
        fleet = _fleet(target)
    except urllib.error.HTTPError as error:
        error.close()
        print(f"swell status: {target.url} answers {error.code}: {error.reason}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"swell status: {target.url} cannot be reached: {error}", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = engine_rows(cluster, fleet)
    console.print(_summary(cluster, fleet, rows), highlight=False, soft_wrap=True)
    table = Table("rank", "node", "state", "running", "waiting", "KV cache", "restarts", box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    servers: dict[str, str] = fleet.get("api_servers", {}) if fleet else {}
    if servers:
        table = Table("API server", "state", box=None)
        for server in servers.items():
            table.add_row(*server)
        console.print(table)
    return 0 if rows and all(row[2] == "ready" for row in rows) else 1


def engine_rows(cluster: dict[str, Any], fleet: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """Return what is shown of each engine: those that have joined, then those that have not.

    Args:
        cluster: the answer of /status.json.
        fleet: that of /admin/scale, if it may be seen.
    """
    # With several nodes, phases are by NODE/NUMBER, which no rank is.
    is_one_node = fleet is not None and not fleet["nodes"]
    phases: dict[str, str] = fleet["engines"] if fleet else {}
    hosts: dict[str, str] = fleet.get("hosts", {}) if fleet else {}
    rows = []
    joined = set()
    for engine in cluster["engines"]:
        rank = str(engine["rank"])
        joined.add(rank)
        state = "halted" if engine["halted"] else "ready" if engine["ready"] else "joined"
        if is_one_node and state != "halted":
            state = phases.get(rank, state)
        rows.append(_row(rank, hosts.get(rank, engine["host"]), state, engine))
    for name, phase in phases.items():
        if is_one_node and name not in joined:
            rows.append(_row(name, hosts.get(name, NOT_TOLD), phase, None))
        elif not is_one_node and phase != "ready":
            rows.append(_row(NOT_TOLD, name, phase, None))
    return rows


def _row(rank: str, node: str, state: str, engine: dict[str, Any] | None) -> tuple[str, ...]:
    counts = engine["counts"] if engine else None
    shown = (NOT_TOLD, NOT_TOLD, NOT_TOLD)
    if counts:
        shown = (str(counts["running"]), str(counts["waiting"]), f"{counts['kv_usage']:.0%}")
    return (rank, node, state, *shown, str(engine["restarts"]) if engine else NOT_TOLD)


def _summary(
    cluster: dict[str, Any], fleet: dict[str, Any] | None, rows: list[tuple[str, ...]]
) -> str:
    serving = sum(row[2] == "ready" for row in rows)
    wished = fleet["data_parallel_size"] if fleet else len(rows)
    text = (
        f"Swell {cluster['version']}, {', '.join(cluster['models'])}: {serving} of {wished} "
        f"engines ready, {cluster['num_front_ends']} API servers"
    )
    waiting: dict[str, str] = fleet.get("waiting", {}) if fleet else {}
    for lacks, number in sorted(Counter(waiting.values()).items()):
        text += f", {number} wait for {lacks}"
    if fleet and fleet["error"]:
        text += f"; last change: {fleet['error']}"
    return text


def _fleet(target: StatusTarget) -> dict[str, Any] | None:
    """Return what the supervisor says; None if there is none, or it is not for this key."""
    try:
        return _get(target, "/admin/scale")
    except urllib.error.HTTPError as error:
        error.close()
        return None


def _get(target: StatusTarget, path: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {target.admin_key}"} if target.admin_key else {}
    request = urllib.request.Request(f"{target.url.rstrip('/')}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found
