"""`swell scale` and `swell status`."""

import functools
import json
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from server.config.tools import ScaleConfig, StatusConfig, StatusTarget

POLL_INTERVAL = 0.2

UNKNOWN = "-"


def _call(
    url: str, path: str, admin_key: str | None, body: dict[str, int] | None = None
) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if admin_key:
        headers["Authorization"] = f"Bearer {admin_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def scale(config: ScaleConfig) -> int:
    """Request a change, show its progress until it is done, and return the exit code."""
    target = config.scale
    ask = functools.partial(_call, target.url, "/admin/scale", target.admin_key)
    console = Console(stderr=True)
    try:
        if target.size is not None:
            ask({"data_parallel_size": target.size})
        printed = ""
        with console.status("asking") as shown:
            while (status := ask())["busy"]:
                described = _describe(status)
                shown.update(described)
                if described != printed and not console.is_terminal:
                    print(described, file=sys.stderr)
                printed = described
                time.sleep(POLL_INTERVAL)
    except urllib.error.HTTPError as error:
        message = json.loads(error.read())["error"]["message"]
        print(f"swell scale: {message}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"swell scale: {target.url} cannot be reached: {error}", file=sys.stderr)
        return 1
    if status["error"]:
        if status["nodes"]:
            print(_describe(status), file=sys.stderr)
        print(f"swell scale: {status['error']}", file=sys.stderr)
        return 1
    print(_describe(status))
    return 0


def _describe(status: dict[str, Any]) -> str:
    nodes = [
        f"{name}: {_count(node['data_parallel_size'])} ({', '.join(node['engines'].values())})"
        for name, node in status["nodes"].items()
        if node["capacity"] or node["engines"]
    ]
    if nodes:
        return f"{_count(status['data_parallel_size'])}; {'; '.join(nodes)}"
    engines = ", ".join(f"engine {rank} {phase}" for rank, phase in status["engines"].items())
    return f"{_count(status['data_parallel_size'])}: {engines}"


def _count(size: int) -> str:
    return f"{size} engine" if size == 1 else f"{size} engines"


def status(config: StatusConfig) -> int:
    """Query the server, print a table and return the exit code; 0 if every engine is ready."""
    target = config.status
    try:
        cluster = _call(target.url, "/status.json", target.admin_key)
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
    """Return a table row per engine: joined ones first, then the others.

    Args:
        cluster: response of /status.json.
        fleet: response of /admin/scale, None if not accessible.
    """
    # With several nodes, phases are keyed by NODE/NUMBER instead of rank.
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
            rows.append(_row(name, hosts.get(name, UNKNOWN), phase, None))
        elif not is_one_node and phase != "ready":
            rows.append(_row(UNKNOWN, name, phase, None))
    return rows


def _row(rank: str, node: str, state: str, engine: dict[str, Any] | None) -> tuple[str, ...]:
    counts = engine["counts"] if engine else None
    shown = (UNKNOWN, UNKNOWN, UNKNOWN)
    if counts:
        shown = (str(counts["running"]), str(counts["waiting"]), f"{counts['kv_usage']:.0%}")
    return (rank, node, state, *shown, str(engine["restarts"]) if engine else UNKNOWN)


def _summary(
    cluster: dict[str, Any], fleet: dict[str, Any] | None, rows: list[tuple[str, ...]]
) -> str:
    serving = sum(row[2] == "ready" for row in rows)
    target = fleet["data_parallel_size"] if fleet else len(rows)
    text = (
        f"Swell {cluster['version']}, {', '.join(cluster['models'])}: {serving} of {target} "
        f"engines ready, {cluster['num_front_ends']} API servers"
    )
    waiting: dict[str, str] = fleet.get("waiting", {}) if fleet else {}
    for lacks, number in sorted(Counter(waiting.values()).items()):
        text += f", {number} wait for {lacks}"
    if fleet and fleet["error"]:
        text += f"; last change: {fleet['error']}"
    return text


def _fleet(target: StatusTarget) -> dict[str, Any] | None:
    """Return the supervisor's state; None if there is no supervisor or the key lacks access."""
    try:
        return _call(target.url, "/admin/scale", target.admin_key)
    except urllib.error.HTTPError as error:
        error.close()
        return None
