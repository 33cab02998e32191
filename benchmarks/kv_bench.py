"""Measures KV tiers, a prefill/decode split and routing by cached blocks, on real engines.

    python -m benchmarks.make_model 0.4b /tmp/models/0.4b
    python -m benchmarks.kv_bench --tiers -- /tmp/models/0.4b
    python -m benchmarks.kv_bench --split --prompt 1500 -- /tmp/models/0.4b
    python -m benchmarks.kv_bench --tiers --prompt 400 --rounds 1
    python -m benchmarks.kv_bench --routing

--tiers: time to the first token of a prompt that is nowhere, in the KV cache, in the memory tier
after other prompts have evicted it, and on disk after a restart of everything. --split: four
streams all the time, and a long prompt whenever the previous one is answered, on two mixed engines
and on one of each kind, in turn. --routing: chats of several turns on three engines behind two API
servers, with each policy in turn.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.failover import by_engine
from benchmarks.running_stack import RunningStack
from benchmarks.streams import stream_completion

BLOCK_SIZE = 16
QUESTION = 20
"""Tokens after the shared beginning of a prompt."""
STREAMS, STREAM_TOKENS = 4, 128
POLICIES = ("least-loaded", "prefix-affinity", "prefix-aware")
CHATS, CHATS_AT_ONCE, SYSTEM_PROMPTS = 40, 12, 4
TURNS, TURN_TOKENS = 6, 24


def body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Return a completion request for tokens, without a model's name."""
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}


def made_up(seed: int, count: int) -> list[int]:
    """Return tokens that only this seed yields."""
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(count)]


def total(stack: RunningStack, series: str) -> float:
    """Return the total of a metric over all engines."""
    return sum(asyncio.run(by_engine(stack, series)).values())


def first_token(stack: RunningStack, prefix: list[int], question: int) -> float:
    """Return the milliseconds until the first token of an answer."""
    prompt = prefix + made_up(question, QUESTION)
    record = asyncio.run(stream_completion(f"{stack.url}/v1/completions", body(prompt, 2)))
    assert record.first_token is not None
    return 1000 * record.first_token


def tiers(options: argparse.Namespace, console: Console) -> None:
    """Print the median times of each place in which a prompt's blocks can be."""
    found: dict[str, list[float]] = {}
    questions = iter(range(1_000_000, 2_000_000))

    def ask(stack: RunningStack, where: str, seed: int) -> None:
        prefix = made_up(seed, options.prompt)
        found.setdefault(where, []).append(first_token(stack, prefix, next(questions)))

    @contextlib.contextmanager
    def stack(directory: str) -> Iterator[RunningStack]:
        blocks = 3 * (options.prompt + QUESTION) // (2 * BLOCK_SIZE)
        flags = (
            "--data-parallel-size", "1", "--block-size", str(BLOCK_SIZE),
            "--num-kv-blocks", str(blocks), "--max-model-len", str(options.prompt + QUESTION + 2),
            "--kv-memory-tier-bytes", "4GiB", "--kv-disk-tier-dir", directory,
        )  # fmt: skip
        with RunningStack(*options.serve, *flags, timeout=600) as running:
            first_token(running, made_up(999, options.prompt), 0)  # warms up
            yield running

    seeds = range(options.rounds)
    with TemporaryDirectory(prefix="tier-", dir=options.directory) as name:
        with stack(f"{name}/tier") as running:
            for seed in seeds:
                ask(running, "nowhere: computed", seed)
                ask(running, "in the KV cache", seed)
                before = total(running, "kv_tier_hits_total")
                first_token(running, made_up(1000 + seed, options.prompt), next(questions))
                ask(running, "in the memory tier, after its eviction", seed)
                assert total(running, "kv_tier_hits_total") > before, "nothing was read"
            files = len(list(Path(name).rglob("*.kv")))
        with stack(f"{name}/tier") as running:
            for seed in seeds:
                ask(running, "on disk, after a restart of everything", seed)
            hits = total(running, "kv_tier_hits_total")
            assert hits >= options.rounds * (options.prompt - BLOCK_SIZE), "not all was read"
    table = Table("its blocks are", "first token", "each round")
    for where, times in found.items():
        rounds = ", ".join(f"{each:.0f}" for each in times)
        table.add_row(where, f"{median(times):,.0f} ms", f"{rounds} ms")
    console.print(table, f"{files} blocks on disk, {hits:.0f} tokens read from there")


async def disturbed(stack: RunningStack, options: argparse.Namespace, seed: int) -> list[str]:
    """Return a row of the table of --split: what streams and prompts got."""
    url, until = f"{stack.url}/v1/completions", time.monotonic() + options.seconds
    gaps: list[float] = []
    waits: list[float] = []
    tokens = 0

    async def stream(number: int) -> None:
        nonlocal tokens
        while time.monotonic() < until:
            prompt = made_up(seed + number, QUESTION)
            record = await stream_completion(url, body(prompt, STREAM_TOKENS))
            gaps.extend(array("f", record.gaps))
            tokens += record.output_tokens

    async def prompts() -> None:
        for number in range(10_000):
            if time.monotonic() > until:
                return
            prompt = made_up(seed + 1000 + number, options.prompt)
            record = await stream_completion(url, body(prompt, 2))
            assert record.first_token is not None
            waits.append(record.first_token)

    await asyncio.gather(prompts(), *(stream(number) for number in range(STREAMS)))
    hundredths = quantiles(gaps, n=100)
    return [
        f"{1000 * hundredths[49]:.0f}, {1000 * hundredths[98]:.0f} ms", f"{max(gaps):.2f} s",
        str(tokens), str(len(waits)), f"{median(waits):.2f} s",
    ]  # fmt: skip


def split(options: argparse.Namespace, console: Console) -> None:
    """Print what streams and long prompts get, with and without a split."""
    table = Table(
        "engines", "gap p50, p99", "longest gap", "stream tokens", "long prompts", "first token"
    )
    ways = {"2 mixed": (), "1 prefill, 1 decode": ("--prefill-engines", "1")}
    for number in range(options.rounds):
        for title, flags in ways.items():
            with RunningStack(
                *options.serve, "--data-parallel-size", "2", *flags, timeout=600
            ) as stack:
                asyncio.run(disturbed(stack, argparse.Namespace(prompt=600, seconds=1), 10**6))
                row = asyncio.run(disturbed(stack, options, 10**4 * number))
                hits = total(stack, "kv_transfer_hits_total")
                assert bool(flags) == (hits > 0), "the split is not what it should be"
            table.add_row(title, *row)
    console.print(table)


async def chat(url: str, number: int) -> list[float]:
    """Return the seconds until the first token of each turn of a chat."""
    waits = []
    history = made_up(number % SYSTEM_PROMPTS, 128)
    for turn in range(TURNS):
        history += made_up(100_000 + TURNS * number + turn, 40)
        record = await stream_completion(url, body(history, TURN_TOKENS))
        assert record.first_token is not None
        waits.append(record.first_token)
        await asyncio.sleep(random.Random(number + turn).uniform(0.2, 0.8))  # reads the answer
    return waits


async def chats(url: str) -> list[float]:
    """Return the sorted seconds until the first tokens of all chats, some at a time."""
    slots = asyncio.Semaphore(CHATS_AT_ONCE)

    async def one(number: int) -> list[float]:
        async with slots:
            return await chat(url, number)

    waits = await asyncio.gather(*(one(number) for number in range(CHATS)))
    return sorted(each for of_chat in waits for each in of_chat)


def routing(options: argparse.Namespace, console: Console) -> None:
    """Print what each policy finds in the engines' KV caches."""
    table = Table("policy", "prompt cached", "busiest / mean", "first token p50, p99")
    for _, policy in itertools.product(range(options.rounds), POLICIES):
        with RunningStack(
            *options.serve, "--data-parallel-size", "3", "--api-server-count", "2",
            "--routing-policy", policy, timeout=600,
        ) as stack:  # fmt: skip
            waits = asyncio.run(chats(f"{stack.url}/v1/completions"))
            answered = asyncio.run(by_engine(stack, "engine_generation_tokens_total")).values()
            hits = total(stack, "prefix_cache_hits_total") / total(
                stack, "prefix_cache_queries_total"
            )
        hundredths = quantiles(waits, n=100)
        table.add_row(
            policy, f"{hits:.0%}", f"{max(answered) / mean(answered):.2f}",
            f"{1000 * hundredths[49]:.0f}, {1000 * hundredths[98]:.0f} ms",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tiers", dest="measure", action="store_const", const=tiers)
    what.add_argument("--split", dest="measure", action="store_const", const=split)
    what.add_argument("--routing", dest="measure", action="store_const", const=routing)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round of --split")
    parser.add_argument("--directory", type=Path, help="where the disk tier is created")
    parser.add_argument("serve", nargs="*", help="model and flags for `swell serve`, after --")
    options = parser.parse_args()
    options.measure(options, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
