"""What adapters cost: tokens per second with several in a step, and how long turns take.

python -m benchmarks.lora_bench rates --shape 0.4b --adapters 0 1 4 16 --streams 16
python -m benchmarks.lora_bench turns --streams 64 --adapters 8 --max-loras 2

`rates` compares numbers of adapters in one engine of this process, in turn within the same minute:
the streams are dealt out over the adapters, 0 is none. `turns` starts a server with the bundled
model and streams from more adapters than a step has room for.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from benchmarks.adapter_files import ALL, write_adapter
from benchmarks.running_stack import RunningStack
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AdapterEntry, AdapterSheet, AddRequest, SamplingParams


class Engine:
    """One engine with room for as many adapters as are compared at most."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        from benchmarks.make_model import SHAPES, write_config
        from engine.core.engine_core import EngineCore
        from engine.executor.in_process import InProcessExecutor  # imports torch

        model, root = directory / "model", directory / "adapters"
        write_config(model, SHAPES[options.shape])
        names = [f"a{number}" for number in range(max(options.adapters))]
        for seed, name in enumerate(names):
            write_adapter(root / name, seed=seed, rank=options.rank, modules=ALL, model=model)
        config = EngineConfig(
            model=ModelConfig(model=str(model), load_format="dummy", dtype=options.dtype),
            cache=CacheConfig(enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20),
            scheduler=SchedulerConfig(max_num_seqs=options.streams),
            lora=LoraConfig(
                enable_lora=True,
                max_loras=max(1, *options.adapters),
                max_lora_rank=options.rank,
                lora_dir=str(root),
            ),
        )
        self.core = EngineCore(config, InProcessExecutor(config), rank=0, incarnation=1)
        self.core.front_end_joined(0, 1)
        entries = [AdapterEntry(number, name, name) for number, name in enumerate(names, 1)]
        self.core.adapters.take(AdapterSheet(1, entries))
        refused = self.core.adapters.wait()
        assert not refused, refused
        self._versions = list(self.core.adapters.versions().values())
        self._next_id = 1

    def round(self, adapters: int, options: argparse.Namespace) -> tuple[float, float]:
        """Return prompt tokens and output tokens per second with so many adapters."""
        for number in range(options.streams):
            version = self._versions[number % adapters] if adapters else ""
            sampling = SamplingParams(
                max_tokens=options.tokens, seed=number, temperature=0, ignore_eos=True
            )
            prompt = [(number * 7919 + place * 31) % 32_000 for place in range(options.prompt)]
            request = AddRequest(self._next_id, "", 0, 0, prompt, sampling, adapter=version)
            self.core.handle(request)
            self._next_id += 1
        began = first = time.perf_counter()
        while self.core.has_work:
            self.core.step()
            if self.core.stats().queued_prefill_tokens:
                first = time.perf_counter()
        ended = time.perf_counter()
        outputs = options.streams * (options.tokens - 1)
        return options.streams * options.prompt / (first - began or 1e-9), outputs / (ended - first)


def compare_rates(options: argparse.Namespace) -> None:
    """Print the medians of several rounds."""
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(options, Path(directory))
        rounds: dict[int, list[tuple[float, float]]] = {number: [] for number in options.adapters}
        for number in options.adapters:
            engine.round(number, options)
        for _ in range(options.rounds):
            for number, found in rounds.items():
                found.append(engine.round(number, options))
    plain = None
    print("| adapters in a step | output tok/s | of none |\n|---|---|---|")
    for number, found in rounds.items():
        rate = statistics.median(output for _, output in found)
        plain = plain or rate
        print(f"| {number or 'none'} | {rate:,.0f} | {rate / plain:.2f} |")


class Stream(NamedTuple):
    """What one stream saw, in seconds."""

    first_token: float
    longest_gap: float
    total: float
    tokens: int


def _stream(url: str, model: str, tokens: int) -> Stream:
    body = {
        "model": model, "prompt": "ROMEO:", "max_tokens": tokens, "ignore_eos": True,
        "stream": True, "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = last = time.monotonic()
    first, longest, count = 0.0, 0.0, 0
    with urllib.request.urlopen(request, timeout=200) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            first = first or now - began
            longest, last = max(longest, now - last), now
            usage = json.loads(line[6:]).get("usage")
            count = usage["completion_tokens"] if usage else count
    return Stream(first, longest, time.monotonic() - began, count)


def measure_turns(options: argparse.Namespace) -> None:
    """Print how long streams waited, all begun at once."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        names = [f"a{number}" for number in range(max(options.adapters))]
        modules = [f"{name}={write_adapter(root / name, seed=i)}" for i, name in enumerate(names)]
        flags = (
            "--enable-lora", "--max-loras", str(options.max_loras), "--lora-modules", *modules,
            "--data-parallel-size", "1", "--api-server-count", "1",
        )  # fmt: skip
        with RunningStack(*flags) as stack:
            found: list[Stream] = []

            def run(number: int) -> None:
                name = names[number % len(names)]
                found.append(_stream(stack.url, name, options.tokens))

            threads = [threading.Thread(target=run, args=(n,)) for n in range(options.streams)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    complete = sum(each.tokens == options.tokens for each in found)
    print(f"{complete} of {options.streams} streams complete, {len(names)} adapters")
    for name in ("first_token", "longest_gap", "total"):
        values = sorted(getattr(each, name) for each in found)
        print(f"{name}: median {statistics.median(values):.2f} s, longest {values[-1]:.2f} s")


def main() -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("rates", "turns"))
    parser.add_argument("--shape", default="0.4b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--max-loras", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    (compare_rates if options.part == "rates" else measure_turns)(options)


if __name__ == "__main__":
    main()
