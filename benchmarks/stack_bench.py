"""Measures a whole stack: start time, memory, idle CPU, streaming rate and latencies.

python -m benchmarks.stack_bench
python -m benchmarks.stack_bench --streams 64 --tokens 128 -- --data-parallel-size 1
python -m benchmarks.stack_bench --shares 0.25 0.5 0.75 -- MODEL_DIR --data-parallel-size 1

Saturation is the rate that `--streams` closed-loop clients reach. At each of `--shares` of that
rate requests then arrive by a Poisson process, independent of answers, and the 99th percentiles of
times to first token and of token gaps are compared with the medians. Saturation is measured again
in each round, because other load on the machine varies.
"""

import argparse
import math
import statistics
import time
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.running_stack import RunningStack, StackFailed, swell_bench

MEMORY_BUDGET_MB = {"coordinator": 40, "api": 130, "engine": 500}
IDLE_SECONDS = 10
AIMS = {"ttft": 1.8, "itl": 2.2}
"""Maximum ratio of the 99th percentile to the median, at half of saturation."""


def memory_table(stack: RunningStack, title: str) -> Table:
    """Return resident memory per process, and its budget."""
    table = Table("process", "resident MB", "budget MB", title=title)
    for name, process in sorted(stack.processes().items()):
        budget = MEMORY_BUDGET_MB.get(name.split()[0])
        table.add_row(name, f"{process.memory_info().rss / 1e6:.0f}", str(budget or ""))
    return table


def idle_cpu(stack: RunningStack) -> float:
    """Return the CPU use of the idle stack in cores, over all processes."""
    before, started_at = stack.cpu_seconds(), time.monotonic()
    for _ in track(range(IDLE_SECONDS), description="idle"):
        time.sleep(1)
    return (stack.cpu_seconds() - before) / (time.monotonic() - started_at)


def measure(url: str, options: argparse.Namespace, seed: int, *traffic: str) -> dict[str, Any]:
    """Send requests and return the clients' measurements.

    Raises:
        StackFailed: some requests failed.
    """
    found = swell_bench(
        url, "--num-prompts", str(options.requests), "--random-input-len", str(options.prompt),
        "--random-output-len", str(options.tokens), "--ignore-eos", "--seed", str(seed), *traffic,
    )  # fmt: skip
    if found["failed"]:
        raise StackFailed(f"{found['failed']} requests failed: {found['errors']}")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="clients that saturate the stack")
    parser.add_argument("--prompt", type=int, default=100, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per stream")
    parser.add_argument("--requests", type=int, default=300, help="requests per measurement")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5], help="of saturation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="arguments of `swell serve`, after --")
    options = parser.parse_args()
    console = Console()
    loads = {"saturation": 0.0} | {f"{share:.0%} of it": share for share in options.shares}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in loads}
    with RunningStack(*options.serve, timeout=300) as stack:
        console.print(f"ready after [bold]{stack.ready_after:.1f} s[/]")
        console.print(memory_table(stack, "memory at rest"))
        idle = idle_cpu(stack)
        console.print(f"idle: [bold]{100 * idle:.2f} %[/] of a core, all processes together")
        for number in track(range(options.rounds), description="rounds"):
            for at, (name, share) in enumerate(loads.items()):
                traffic = ["--max-concurrency", str(options.streams)]
                if share:
                    rate = share * found["saturation"][-1]["request_throughput"]
                    traffic = ["--request-rate", str(rate)]
                found[name].append(measure(stack.url, options, 100 * number + at, *traffic))
        console.print(memory_table(stack, "memory after load"))
        console.print(f"stopped in {stack.stop():.1f} s")
    table = Table(
        "load", "requests/s", "tokens/s", "latency", "median ms", "p99 ms", "ratio", "aim"
    )
    for name, rounds in found.items():
        rates = [
            f"{statistics.median(each[what] for each in rounds):.0f}"
            for what in ("request_throughput", "output_throughput")
        ]
        for latency, aim in AIMS.items():
            pairs = [(r[f"median_{latency}_ms"], r[f"p99_{latency}_ms"]) for r in rounds]
            middle, high = (statistics.median(each) for each in zip(*pairs, strict=True))
            # Half of the gaps are 0 if the client reads several tokens at once.
            ratio = statistics.median(high / (middle or math.nan) for middle, high in pairs)
            is_half = loads[name] == 0.5
            table.add_row(
                name, *rates, latency, f"{middle:.1f}", f"{high:.1f}", f"{ratio:.2f}",
                f"<= {aim:g}" if is_half else "",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
