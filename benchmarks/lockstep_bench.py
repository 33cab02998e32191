"""Compares admission policies on real lockstep engines, alternating within minutes.

    python -m benchmarks.lockstep_bench --rounds 7
    python -m benchmarks.lockstep_bench --policies level --overlap

One stack per policy, and with `--overlap` one more whose steps overlap, with the bundled model and
expert parallelism; stacks not being measured are paused and use no CPU. Two loads: `even`, where
all requests are alike and arrive together, so that ranks are in phase and no policy can gain
anything; and `mixed`, with long prompts and outputs of very different lengths, whose prefills
coincide with other requests' decodes.
"""

import argparse
import contextlib
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.running_stack import RunningStack, StackFailed, swell_bench

LOADS = {
    "even": "--num-prompts 16 --max-concurrency 16 --random-input-len 16 --random-output-len 128",
    "mixed": "--num-prompts 24 --max-concurrency 12 --random-input-len 225 --random-output-len 160 "
    "--random-range-ratio 0.6",
}
"""Flags of `swell bench`."""

Rounds = dict[tuple[str, str], list[dict[str, Any]]]
"""Results of `swell bench` per round, by load and policy."""


def measure(url: str, load: str, seed: int) -> dict[str, Any]:
    """Run a load to its end.

    Raises:
        StackFailed: a request failed.
    """
    found = swell_bench(
        url, *LOADS[load].split(), "--ignore-eos", "--temperature", "0", "--num-warmups", "0",
        "--seed", str(seed),
    )  # fmt: skip
    if found["failed"]:
        raise StackFailed(f"{found['failed']} requests failed: {found['errors']}")
    return found


def run(options: argparse.Namespace) -> Rounds:
    """Return the rounds of every load and policy."""
    flags = {policy: ["--admission-policy", policy] for policy in options.policies}
    if options.overlap:
        flags |= {
            f"{policy}, overlapped": [*chosen, "--async-scheduling"]
            for policy, chosen in flags.items()
        }
    measured: Rounds = {}
    with contextlib.ExitStack() as stacks, Progress(console=Console(stderr=True)) as progress:
        urls = {}
        for policy, chosen in flags.items():
            stack = RunningStack(
                "--enable-expert-parallel", "--data-parallel-size", str(options.engines), *chosen,
                "--log-level", "warning", "--max-num-seqs", str(options.max_num_seqs),
                *options.flags,
            )  # fmt: skip
            urls[policy] = stacks.enter_context(stack).url
        loads = options.loads
        task = progress.add_task("rounds", total=(options.rounds + 1) * len(loads) * len(urls))
        for number in range(options.rounds + 1):
            for load in loads:
                for policy, url in list(urls.items())[:: 1 if number % 2 else -1]:
                    # The first round warms up. The others send the same requests to every policy.
                    found = measure(url, load, number)
                    if number:
                        measured.setdefault((load, policy), []).append(found)
                    progress.advance(task)
    return measured


def table(measured: Rounds, baseline: str) -> Table:
    """Return medians over the rounds, and gains over the baseline of the same round."""
    result = Table("load", "policy", "tok/s", f"against {baseline}", "TTFT", "TPOT")
    for (load, policy), rounds in sorted(measured.items()):
        rates, first, each = (
            [found[what] for found in rounds]
            for what in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
        )
        others = [found["output_throughput"] for found in measured.get((load, baseline), rounds)]
        gain = median(one / other - 1 for one, other in zip(rates, others, strict=True))
        result.add_row(
            load, policy, f"{median(rates):.0f}", f"{100 * gain:+.1f} %",
            f"{median(first):.0f} ms", f"{median(each):.1f} ms",
        )  # fmt: skip
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["none", "level"])
    parser.add_argument("--overlap", action="store_true", help="with overlapped steps as well")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="beside one that warms up")
    parser.add_argument("flags", nargs="*", help="more flags of `swell serve`, after --")
    options = parser.parse_args()
    Console().print(table(run(options), options.policies[0]))


if __name__ == "__main__":
    main()
