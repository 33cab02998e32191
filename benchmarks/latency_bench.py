"""How even latencies are at part of the load that saturates a stack.

python -m benchmarks.latency_bench
python -m benchmarks.latency_bench --shares 0.25 0.5 0.75 -- MODEL_DIR --data-parallel-size 1

Starts the whole stack, measures its saturation with as many clients as `--streams`, each of which
sends its next request when the last one is answered, then sends requests at shares of that rate
(arrivals by a Poisson process, whatever the answers) and prints how far the slowest percent of
first tokens, and of gaps between tokens, are from the median. Saturation is measured again in each
round, because other work on the machine comes and goes.
"""

import argparse
import statistics

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.running_stack import RunningStack
from server.bench.config import BenchConfig, TargetConfig, TrafficConfig, WorkloadConfig
from server.bench.run import run
from server.bench.summary import Distribution, Summary, summarize

AIMS = {"ttft": 1.8, "itl": 2.2}
"""Most that the 99th percentile may be, in medians, at half of saturation."""


def measure(
    url: str, options: argparse.Namespace, traffic: TrafficConfig, requests: int, seed: int
) -> Summary:
    """Send requests and return what their clients saw.

    Raises:
        SystemExit: some were not answered.
    """
    config = BenchConfig(
        target=TargetConfig(url=url),
        workload=WorkloadConfig(
            num_prompts=requests,
            random_input_len=options.prompt,
            random_output_len=options.tokens,
            ignore_eos=True,
            seed=seed,
        ),
        traffic=traffic,
    )
    summary = summarize(run(config, lambda progress: None).records, (50.0, 99.0), {})
    if summary.failed:
        raise SystemExit(f"{summary.failed} requests failed: {summary.errors}")
    return summary


def spread(latency: Distribution | None) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    assert latency is not None, "streams have first tokens and gaps"
    return latency.percentiles[50.0], latency.percentiles[99.0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="clients that saturate the stack")
    parser.add_argument("--prompt", type=int, default=100, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per stream")
    parser.add_argument("--requests", type=int, default=300, help="requests per measurement")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="arguments of `swell serve`, after --")
    options = parser.parse_args()
    found: dict[tuple[float, str], list[tuple[float, float]]] = {}
    rates = []
    with RunningStack(*options.serve, timeout=300) as stack:
        closed = TrafficConfig(max_concurrency=options.streams)
        measure(stack.url, options, closed, options.streams, seed=0)  # warms up
        for number in track(range(1, options.rounds + 1), description="rounds"):
            full = measure(stack.url, options, closed, options.requests, seed=100 * number)
            rates.append(full.request_throughput)
            for index, share in enumerate(options.shares, 1):
                traffic = TrafficConfig(request_rate=share * full.request_throughput)
                part = measure(
                    stack.url, options, traffic, options.requests, seed=100 * number + index
                )
                for name in AIMS:
                    found.setdefault((share, name), []).append(spread(part.latencies[name]))
    console = Console()
    console.print(
        f"saturation: {statistics.median(rates):.1f} requests/s, "
        f"{statistics.median(rates) * options.tokens:.0f} tokens/s (median of {len(rates)})"
    )
    table = Table("load", "latency", "median ms", "p99 ms", "p99 / median", "rounds", "aim")
    for (share, name), spreads in found.items():
        ratios = [high / middle for middle, high in spreads]
        table.add_row(
            f"{share:.0%}",
            name,
            f"{statistics.median(middle for middle, _ in spreads):.1f}",
            f"{statistics.median(high for _, high in spreads):.1f}",
            f"{statistics.median(ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            f"<= {AIMS[name]:g}" if share == 0.5 else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
