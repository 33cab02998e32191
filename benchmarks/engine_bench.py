"""Runs an engine without sockets and breaks down the time of its steps.

python -m benchmarks.engine_bench 0.4b
python -m benchmarks.engine_bench 2-layer --rows 64 --greedy
python -m benchmarks.engine_bench 0.4b --rows 1 16 --prefill 512 --quantization int8 --threads 2

Loads one model and, for every number of rows, decodes that many sequences at once; for every
prefill, computes prompts of that length, one per step. A step has these parts:

schedule   the scheduler makes the plan
prepare    the plan becomes arrays, attention is planned
execute    the model, from token ids to logits; "linear" is the share of the step in its products
sample     logits become tokens
emit       the scheduler takes the tokens, the outputs are encoded for their front end

Reported are medians over steps; "fastest" is the fastest tenth of steps, which other load on the
machine affects least.
"""

import argparse
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from engine.executor.environment import configure_environment
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.writable import writable_file

PARTS = ("schedule", "prepare", "execute", "sample", "emit")
_WARM_UP_STEPS = 8


class Load(NamedTuple):
    """One line of the report."""

    name: str
    rows: int
    prompt: int
    tokens: int
    """Tokens generated per sequence."""
    repetitions: int
    warm_up: int
    """Steps to exclude."""


class Clock:
    """Accumulates the time of named parts, per step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._within = threading.local()

    def add(self, part: str, amount: float) -> None:
        """Add time, or tokens, to a part of the current step."""
        self._now[part] = self._now.get(part, 0.0) + amount

    def end_step(self, seconds: float) -> None:
        """Finish the current step."""
        self.steps.append({**self._now, "step": seconds})
        self._now = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to count its time; nested calls of the same part count once."""

        def call(*arguments: Any, **options: Any) -> Any:
            if getattr(self._within, part, False):
                return function(*arguments, **options)
            started_at = time.perf_counter()
            setattr(self._within, part, True)
            try:
                return function(*arguments, **options)
            finally:
                setattr(self._within, part, False)
                self.add(part, time.perf_counter() - started_at)

        return call


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap an attribute of a module, class or object within the block."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def instrumented(clock: Clock) -> Iterator[None]:
    """Time the parts of every step in this process."""
    from engine.models.decoder import Decoder
    from engine.models.products import blocked, converted, dense, int4, int8, mxfp4
    from engine.runner import model_runner
    from engine.scheduler.scheduler import Scheduler

    products = (
        blocked.BlockedLinear,
        converted.ConvertedLinear,
        dense.DenseLinear,
        dense.PackedLinear,
        int4.Int4Linear,
        int8.Int8Linear,
        int8.Int8WeightLinear,
        mxfp4.Mxfp4Linear,
    )
    with ExitStack() as stack:
        for owner, name, part in (
            (Scheduler, "schedule", "schedule"),
            (Scheduler, "update", "update"),
            (Decoder, "forward", "execute"),
            (Decoder, "logits", "execute"),
            (model_runner, "sample", "sample"),
            (model_runner.ModelRunner, "run", "run"),
            *((product, "forward", "linear") for product in products),
            (dense.PackedLinear, "add_to", "linear"),
        ):
            stack.enter_context(replaced(owner, name, functools.partial(clock.timed, part)))
        yield


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters shared by all sequences."""
    temperature = 0.0 if options.greedy else 1.0
    return {"temperature": temperature, "top_k": options.top_k, "top_p": options.top_p}


def run_load(
    core: Any, clock: Clock, load: Load, sampling: dict[str, Any], vocab_size: int
) -> None:
    """Run all sequences through the core, recording every step in the clock."""
    import random

    from engine.shared.messages import AddRequest, SamplingParams, StepOutputs, encode

    draw = random.Random(load.rows)
    for id_ in range(load.rows):
        params = SamplingParams(max_tokens=load.tokens, seed=id_, ignore_eos=True, **sampling)
        tokens = [draw.randrange(vocab_size) for _ in range(load.prompt)]
        core.handle(AddRequest(id_, str(id_), 0, 0, tokens, params))
    while core.has_work:
        started_at = time.perf_counter()
        step = core.step()
        for outputs in step.outputs.values():
            encode(StepOutputs(step.stats, outputs))
        ended = time.perf_counter()
        clock.add("tokens", sum(len(outputs) for outputs in step.outputs.values()))
        clock.end_step(ended - started_at)


def parts_of(step: dict[str, float]) -> dict[str, float]:
    """Split a step's time; the remainder of the loop counts as emit."""
    execute, sample = step.get("execute", 0.0), step.get("sample", 0.0)
    schedule, run = step.get("schedule", 0.0), step.get("run", 0.0)
    return {
        "step": step["step"],
        "schedule": schedule,
        "prepare": run - execute - sample,
        "execute": execute,
        "sample": sample,
        "emit": step["step"] - schedule - run,
        "linear": step.get("linear", 0.0),
    }


def median_parts(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each part."""
    split = [parts_of(step) for step in steps]
    return {name: statistics.median(each[name] for each in split) for name in split[0]}


def measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Return the parts of all steps, and of the fastest ones, by load."""
    from engine.core.engine_core import EngineCore
    from engine.executor.in_process import InProcessExecutor

    config = engine_config(options)
    executor = InProcessExecutor(config, engines_on_node=1)
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    vocab_size = executor.info.vocab_size
    results = {}
    for load in loads(options):
        clock = Clock()
        with instrumented(clock):
            for _ in range(load.repetitions):
                run_load(core, clock, load, sampling_of(options), vocab_size)
        steps = [step for step in clock.steps if step["tokens"] == load.rows][load.warm_up :]
        fastest = sorted(steps, key=lambda step: step["step"])[: max(1, len(steps) // 10)]
        results[load.name] = {
            "all": median_parts(steps),
            "fastest": median_parts(fastest),
        }
    return results


def loads(options: argparse.Namespace) -> list[Load]:
    """Return the loads requested on the command line."""
    decode = [
        Load(f"decode, {rows} rows", rows, options.prompt, options.steps, 1, _WARM_UP_STEPS)
        for rows in options.rows
    ]
    prefill = [
        Load(f"prefill, {length} tokens", 1, length, 1, options.prefills + 2, 2)
        for length in options.prefill
    ]
    return decode + prefill


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings; a named shape gets random weights."""
    from benchmarks.make_model import SHAPES, write_config  # imports torch

    model = options.model
    load_format: Literal["auto", "dummy"] = "auto"
    if model in SHAPES:
        directory = Path("build/bench-shapes") / model
        write_config(directory, SHAPES[model])
        model, load_format = str(directory), "dummy"
    longest = max([options.prompt + options.steps, *(length + 1 for length in options.prefill)])
    # All prompts of a load in one step, so that all its sequences decode together.
    budget = max([*options.prefill, *(rows * options.prompt for rows in options.rows)])
    fields: dict[str, Any] = (
        {} if options.quantization is None else {"quantization": options.quantization}
    )
    return EngineConfig(
        model=ModelConfig(model=model, load_format=load_format, max_model_len=longest, **fields),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_seqs=max([1, *options.rows]), max_num_batched_tokens=budget
        ),
        executor=ExecutorConfig(
            threads=options.threads,
            batch_invariant=options.batch_invariant,
            enforce_eager=options.enforce_eager,
        ),
    )


def table(results: dict[str, dict[str, dict[str, float]]], which: str) -> Table:
    """Return a table of milliseconds and shares of the step."""
    result = Table("load", "steps/s", "tok/s", "step ms", *PARTS, "linear", title=which)
    for name, both in results.items():
        parts = both[which]
        step = parts["step"]
        tokens = int(name.split()[1])
        cells = [
            f"{parts[part] * 1e3:.2f} ({parts[part] / step:.0%})" for part in (*PARTS, "linear")
        ]
        result.add_row(name, f"{1 / step:.1f}", f"{tokens / step:.0f}", f"{step * 1e3:.2f}", *cells)
    return result


def command_line() -> argparse.ArgumentParser:
    """Return the option parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory, or 0.4b or 2-layer: random weights")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=16, help="tokens before the decodes")
    parser.add_argument("--steps", type=int, default=64, help="decode steps per number of rows")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--prefills", type=int, default=8, help="prompts per length")
    parser.add_argument("--greedy", action="store_true", help="temperature 0 instead of 1")
    parser.add_argument("--top-k", type=int, default=0, help="tokens that may be drawn; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction)
    parser.add_argument("--enforce-eager", action="store_true", help="torch's operators alone")
    parser.add_argument("--json", type=Path, help="write the numbers, in seconds, to this file")
    return parser


def main() -> None:
    """Measure and print."""
    parser = command_line()
    options = parser.parse_args()
    if options.steps <= _WARM_UP_STEPS or options.prefills < 1:
        parser.error(f"--steps has to be more than {_WARM_UP_STEPS}, --prefills at least 1")
    if not options.rows and not options.prefill:
        parser.error("nothing to do: --rows or --prefill needs a number")
    if options.json is not None:
        writable_file(options.json)
    configure_environment()
    results = measure(options)
    console = Console(width=150)
    for which in ("all", "fastest"):
        console.print(table(results, which))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
