"""Compares numbers of guessed tokens (`--speculative-ngram`), in turn within the same minute.

python -m benchmarks.speculation_bench [MODEL] --guesses 0 4 8 --streams 1 16

One engine in this process. "repetitive" continues a text that repeats itself, greedily; "plain"
draws at temperature 1 from a text that does not. Every row must give the same tokens.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from engine.core.engine_core import EngineCore
from engine.executor.environment import settle_environment
from engine.shared.config import (
    BUNDLED_MODEL,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AddRequest, SamplingParams


class Run(NamedTuple):
    """One round of one setting."""

    rate: float
    """Output tokens per second."""
    per_row: float
    """Output tokens per row computed: one, and the guesses that were right."""
    accepted: float
    """Share of the guessed tokens that were right."""
    outputs: dict[int, list[int]]


class Engine:
    """One engine with one number of guesses."""

    def __init__(self, options: argparse.Namespace, guesses: int) -> None:
        from engine.executor.in_process import InProcessExecutor  # imports torch

        config = EngineConfig(
            model=ModelConfig(
                model=options.model, load_format=options.load_format, dtype=options.dtype
            ),
            cache=CacheConfig(enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20),
            scheduler=SchedulerConfig(
                speculative_ngram=guesses,
                prompt_lookup_min=options.lookup_min,
                prompt_lookup_max=options.lookup_max,
            ),
        )
        self.core = EngineCore(config, InProcessExecutor(config), rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)

    def run(self, prompts: list[list[int]], tokens: int, temperature: float) -> Run:
        """Continue every prompt by so many tokens."""
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(
                max_tokens=tokens, seed=number, temperature=temperature, ignore_eos=True
            )
            self.core.handle(AddRequest(number, str(number), 0, 0, prompt, sampling))
        outputs: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
        before = self.core.stats()
        began = time.perf_counter()
        while self.core.has_work:
            for output in self.core.step().outputs.get(0, []):
                outputs[output.id] += output.token_ids
        seconds = time.perf_counter() - began
        after = self.core.stats()
        guessed = after.counters.spec_draft_tokens - before.counters.spec_draft_tokens
        right = after.counters.spec_accepted_tokens - before.counters.spec_accepted_tokens
        total = len(prompts) * tokens
        return Run(
            rate=total / seconds,
            per_row=total / (total - right),
            accepted=right / max(1, guessed),
            outputs=outputs,
        )


def prompts(kind: str, streams: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts; repetitive ones say the same 30 tokens again and again."""
    source = random.Random(streams)
    size = 30 if kind == "repetitive" else length
    texts = [[source.randrange(vocab_size) for _ in range(size)] for _ in range(streams)]
    return [(text * (length // size + 1))[:length] for text in texts]


def measure(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the cells of one row per kind of text, number of streams and setting."""
    engines = {guesses: Engine(options, guesses) for guesses in options.guesses}
    vocab_size = next(iter(engines.values())).core.operations.vocab_size
    for kind, streams in itertools.product(("repetitive", "plain"), options.streams):
        texts = prompts(kind, streams, options.prompt, vocab_size)
        temperature = 0.0 if kind == "repetitive" else 1.0
        runs: dict[int, list[Run]] = {guesses: [] for guesses in engines}
        for number in range(options.rounds + 1):
            for guesses in list(engines)[:: 1 if number % 2 else -1]:
                run = engines[guesses].run(texts, options.tokens, temperature)
                if number:  # the first round warms up
                    runs[guesses].append(run)
        base = statistics.median(run.rate for run in next(iter(runs.values())))
        expected = next(iter(runs.values()))[0].outputs
        for guesses, of_setting in runs.items():
            rate = statistics.median(run.rate for run in of_setting)
            last = of_setting[-1]
            same = sum(last.outputs[number] == expected[number] for number in expected)
            yield (
                kind, str(streams), str(guesses), f"{rate:.0f}", f"{rate / base:.2f}",
                f"{last.per_row:.2f}", f"{last.accepted:.0%}", f"{same}/{streams}",
            )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(BUNDLED_MODEL))
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--guesses", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--lookup-min", type=int)
    parser.add_argument("--lookup-max", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    settle_environment()
    widths = (10, 7, 7, 12, 5, 12, 8, 11)
    head = ("text", "streams", "guesses", "output tok/s", "ratio", "tokens / row", "accepted",
            "same tokens")  # fmt: skip
    for cells in itertools.chain([head], measure(parser.parse_args())):
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print(line, flush=True)


if __name__ == "__main__":
    main()
