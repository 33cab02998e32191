"""Starts the whole stack and prints start time, memory, idle CPU, balance and streaming speed.

python -m benchmarks.stack_bench
python -m benchmarks.stack_bench --streams 64 --tokens 128 -- --data-parallel-size 1
"""

import argparse
import asyncio
import re
import statistics
import time
import urllib.request
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.running_stack import RunningStack
from server.bench.client import StreamResult, stream_many

MEMORY_BUDGET_MB = {"coordinator": 40, "api": 130, "engine": 500}
IDLE_SECONDS = 10
LOAD_ROUNDS = 3


def memory_table(stack: RunningStack, title: str) -> Table:
    """Return resident memory per process against its budget."""
    table = Table("process", "resident MB", "budget MB", title=title)
    for name, process in sorted(stack.processes().items()):
        budget = MEMORY_BUDGET_MB.get(name.split()[0])
        table.add_row(name, f"{process.memory_info().rss / 1e6:.0f}", str(budget or ""))
    return table


def idle_cpu(stack: RunningStack, seconds: int) -> float:
    """Return the share of one core that the idle stack uses, all processes together."""
    before, began = stack.cpu_seconds(), time.monotonic()
    for _ in track(range(seconds), description="idle"):
        time.sleep(1)
    return (stack.cpu_seconds() - before) / (time.monotonic() - began)


def routed(url: str) -> dict[str, float]:
    """Return routing decisions per engine from /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for labels, value in re.findall(r"routing_decisions_total\{([^}]*)\} (\S+)", text):
        engine = re.search(r'engine="(\d+)"', labels)
        assert engine is not None
        found[engine[1]] = found.get(engine[1], 0.0) + float(value)
    return found


def load(url: str, streams: int, tokens: int, requests: int, model: str) -> list[StreamResult]:
    """Stream completions of different prompts and return their results."""
    bodies: list[dict[str, object]] = [
        {
            "model": model, "prompt": f"ROMEO: {i} and {time.monotonic_ns()}",
            "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0,
        }
        for i in range(requests)
    ]  # fmt: skip
    return asyncio.run(stream_many(f"{url}/v1/completions", bodies, streams))


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per stream")
    parser.add_argument("--requests", type=int, default=200, help="requests per round")
    parser.add_argument("--model", default="swell-shakespeare", help="model name in requests")
    parser.add_argument("serve", nargs="*", help="flags for `swell serve`, after --")
    options = parser.parse_args()
    console = Console()
    with RunningStack(*options.serve, timeout=300) as stack:
        console.print(f"ready after [bold]{stack.ready_after:.1f} s[/]")
        console.print(memory_table(stack, "memory at rest"))
        idle = idle_cpu(stack, IDLE_SECONDS)
        console.print(f"idle: [bold]{100 * idle:.2f} %[/] of a core, all processes together")
        speeds, results = [], []
        before = routed(stack.url)
        for _ in track(range(LOAD_ROUNDS), description="load"):
            began = time.monotonic()
            results = load(
                stack.url, options.streams, options.tokens, options.requests, options.model
            )
            speeds.append(sum(each.tokens for each in results) / (time.monotonic() - began))
        after = routed(stack.url)
        shares = {engine: after[engine] - before.get(engine, 0) for engine in sorted(after)}
        gaps = [gap for each in results for gap in each.gaps]
        firsts = [each.first_token for each in results]
        console.print(
            f"streaming, {options.streams} at once, {options.tokens} tokens each: "
            f"[bold]{statistics.median(speeds):.0f} tokens/s[/] (median of {LOAD_ROUNDS})"
        )
        for name, values in (("first token", firsts), ("between tokens", gaps)):
            console.print(
                f"{name}: median {1000 * statistics.median(values):.1f} ms, "
                f"p99 {1000 * percentile(values, 0.99):.1f} ms"
            )
        console.print(f"requests per engine: {shares}")
        console.print(memory_table(stack, "memory after load"))
        console.print(f"stopped in {stack.stop():.1f} s")


if __name__ == "__main__":
    main()
