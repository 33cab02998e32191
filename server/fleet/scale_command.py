"""`swell scale N`: change the number of engines of a running node or cluster, and watch."""

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console

from server.fleet.scale_config import ScaleConfig, ScaleTarget

POLL_INTERVAL = 0.2


def scale(config: ScaleConfig) -> int:
    """Ask the node, show its progress until it is done, and return the exit code."""
    target = config.scale
    console = Console(stderr=True)
    try:
        if target.size is not None:
            _call(target, {"data_parallel_size": target.size})
        with console.status("asking") as shown:
            while (status := _call(target))["busy"]:
                shown.update(_describe(status))
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


def _call(target: ScaleTarget, body: dict[str, int] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{target.url.rstrip('/')}/admin/scale",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {target.admin_key or ''}"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        status: dict[str, Any] = json.loads(answer.read())
        return status


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
