"""Compares admission policies on real engines that step together, in turn within the same minutes.

    python -m benchmarks.lockstep_bench --rounds 7
    python -m benchmarks.lockstep_bench --policies level --overlap

One stack per policy, and with `--overlap` one more whose steps overlap, with the bundled model and
expert parallelism; those whose turn it is not are paused and use no processor. Two loads: `even`,
where all requests are alike and come together, so that ranks are in phase and no policy has
anything to gain; and `mixed`, long prompts and long outputs of very different lengths, whose
prefills meet other requests' decodes.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.running_stack import RunningStack
from benchmarks.streams import stream_many
from server.bench.summary import Record

MODEL = "swell-shakespeare"
WORDS = ("love", "king", "night", "sword", "honour", "crown", "sweet", "death", "ghost", "rose")
MILLISECONDS = 1000.0


class Load(NamedTuple):
    """Requests that are sent with a bounded number at a time."""

    bodies: list[dict[str, Any]]
    concurrency: int


class Measured(NamedTuple):
    """What one round of a load gave."""

    rate: float
    """Output tokens per second."""
    first_token: float
    """Mean seconds until the first token."""
    per_token: float
    """Mean seconds per further token."""
    seconds: float
    """Mean seconds from the sending of a request to its end."""


def body(draw: random.Random, prompt_words: int, tokens: int) -> dict[str, Any]:
    """Return a request whose prompt nobody has sent before."""
    prompt = " ".join(draw.choice(WORDS) for _ in range(prompt_words))
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
        "temperature": 0, "stream": True,
    }  # fmt: skip


def even_load(seed: int) -> Load:
    """Requests that are all alike and come at once: the ranks are in phase by themselves."""
    draw = random.Random(seed)
    return Load([body(draw, 16, 128) for _ in range(16)], 16)


def mixed_load(seed: int) -> Load:
    """Long prompts and long outputs, of very different lengths."""
    draw = random.Random(seed)
    bodies = [body(draw, draw.randint(100, 350), draw.randint(20, 300)) for _ in range(24)]
    return Load(bodies, 12)


LOADS = {"even": even_load, "mixed": mixed_load}


async def measure(url: str, load: Load) -> Measured:
    """Send a load and wait for its end.

    Raises:
        RuntimeError: a request failed.
    """
    began = time.perf_counter()
    results = await stream_many(f"{url}/v1/completions", load.bodies, load.concurrency)
    elapsed = time.perf_counter() - began
    failed = [result.error or result.detail for result in results if result.status != 200]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, for example: {failed[0]}")
    return Measured(
        rate=sum(result.output_tokens for result in results) / elapsed,
        first_token=statistics.mean(result.first_token or 0.0 for result in results),
        per_token=statistics.mean(_per_token(result) for result in results),
        seconds=statistics.mean(result.total for result in results),
    )


def _per_token(result: Record) -> float:
    return (result.total - (result.first_token or 0.0)) / max(1, result.output_tokens - 1)


def policies(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the flags of everything to compare, by name."""
    found = {}
    for policy in options.policies:
        found[policy] = ["--admission-policy", policy]
        if options.overlap:
            found[f"{policy}, overlapped"] = [*found[policy], "--async-scheduling"]
    return found


def run(options: argparse.Namespace) -> dict[tuple[str, str], list[Measured]]:
    """Return the rounds of every load and policy."""
    measured: dict[tuple[str, str], list[Measured]] = {}
    with contextlib.ExitStack() as stacks, Progress(console=Console(stderr=True)) as progress:
        urls = {}
        for policy, chosen in policies(options).items():
            flags = [
                "--enable-expert-parallel", "--data-parallel-size", str(options.engines),
                *chosen, "--log-level", "warning",
                "--max-num-seqs", str(options.max_num_seqs), *options.flags,
            ]  # fmt: skip
            urls[policy] = stacks.enter_context(RunningStack(*flags)).url
        loads = options.loads
        task = progress.add_task("rounds", total=(options.rounds + 1) * len(loads) * len(urls))
        for number in range(options.rounds + 1):
            for name in loads:
                order = list(urls.items())[:: 1 if number % 2 else -1]
                for policy, url in order:
                    # The first round warms up. The others send the same to every policy.
                    result = asyncio.run(measure(url, LOADS[name](number)))
                    if number:
                        measured.setdefault((name, policy), []).append(result)
                    progress.advance(task)
    return measured


def table(measured: dict[tuple[str, str], list[Measured]], baseline: str) -> Table:
    """Return medians over the rounds, and the gain over the baseline in the same round."""
    made = Table("load", "policy", "tok/s", f"against {baseline}", "TTFT", "TPOT", "latency")
    for (load, policy), rounds in sorted(measured.items()):
        pairs = zip(rounds, measured.get((load, baseline), rounds), strict=True)
        gain = statistics.median(one.rate / other.rate - 1 for one, other in pairs)
        made.add_row(
            load,
            policy,
            f"{statistics.median(each.rate for each in rounds):.0f}",
            f"{100 * gain:+.1f} %",
            f"{MILLISECONDS * statistics.median(each.first_token for each in rounds):.0f} ms",
            f"{MILLISECONDS * statistics.median(each.per_token for each in rounds):.1f} ms",
            f"{statistics.median(each.seconds for each in rounds):.2f} s",
        )
    return made


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
