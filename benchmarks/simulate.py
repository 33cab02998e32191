"""Measures scheduling and routing in virtual time.

python -m benchmarks.simulate fleet --engines 1000 --front-ends 64 --requests 100000
python -m benchmarks.simulate lockstep --ranks 4 --admission-policy level --plot run.png
python -m benchmarks.simulate c1

The same seed gives the same numbers.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.simulation.calibration import (
    STREAMS,
    Case,
    Mean,
    Run,
    cases,
    checks,
    mean_of,
    run_case,
)
from benchmarks.simulation.costs import CostModel
from benchmarks.simulation.fleet import Fleet, FleetShape
from benchmarks.simulation.lockstep import ByPolicy, FewestRequests, LockstepGroup, Router
from benchmarks.simulation.plots import PlottingUnavailable, draw_calibration, draw_run, load_pyplot
from benchmarks.simulation.records import Recorder, summarize
from benchmarks.simulation.replica import EngineShape
from benchmarks.simulation.report import calibration_page, summary_table
from benchmarks.simulation.workload import (
    NS,
    InvalidSpec,
    Lengths,
    Workload,
    burst,
    closed_loop,
    draw_requests,
    poisson,
    read_trace,
)
from engine.shared.config import EngineConfig, SchedulerConfig
from engine.shared.settings import settings_of
from engine.shared.writable import writable_directory, writable_file
from server.router.routing import POLICIES as ROUTING_POLICIES

DOCS = Path(__file__).parent.parent / "docs"
TIMELINE_POINTS = 400
[ADMISSION_POLICIES] = (
    each.choices for each in settings_of(EngineConfig) if each.name == "admission_policy"
)
DRAWN = [Case("pub", policy) for policy in ("none", "balance", "level")]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fleet = commands.add_parser("fleet", help="independent engines behind front ends")
    fleet.add_argument("--engines", type=int, default=1000)
    fleet.add_argument("--front-ends", type=int, default=64)
    fleet.add_argument("--hop-us", type=int, default=200, help="network time of a message")
    fleet.add_argument("--publish-interval", type=float, default=0.1, metavar="S")
    # Simulated prompts have nothing in common that an affinity could go by.
    routing = [name for name in ROUTING_POLICIES if name != "prefix-affinity"]
    fleet.add_argument("--routing-policy", choices=routing, default="least-loaded")
    lockstep = commands.add_parser("lockstep", help="one group that steps together")
    lockstep.add_argument("--ranks", type=int, default=4)
    lockstep.add_argument(
        "--routing-policy", choices=("fewest-requests", *routing), default="fewest-requests"
    )
    lockstep.add_argument("--gather-first", action="store_true", help="the wrong order of a step")
    for command in (fleet, lockstep):
        _add_common(command)
    lockstep.set_defaults(requests=2000, rate=40.0)
    c1 = commands.add_parser("c1", help="the calibrated group: all loads, policies and streams")
    c1.add_argument("--output", type=Path, default=DOCS, help="directory for page and plot")
    return parser.parse_args(arguments)


def _add_common(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=100_000)
    work.add_argument(
        "--prompt",
        type=Lengths.parse,
        default="lognormal:256,0.8,max=4096",
        metavar="LENGTHS",
        help="constant:N, uniform:LOW,HIGH, normal:MEAN,STDDEV, "
        "lognormal:MEDIAN,SIGMA or exponential:MEAN, with ,min=N ,max=N",
    )
    work.add_argument(
        "--output", type=Lengths.parse, default="exponential:128,max=2048", metavar="LENGTHS"
    )
    work.add_argument("--rate", type=float, default=10_000.0, help="requests per second")
    work.add_argument("--burst", type=int, default=0, help="requests that come at once")
    work.add_argument("--burst-at", type=float, default=1.0, metavar="S")
    work.add_argument("--concurrency", type=int, default=0, help="closed loop of so many clients")
    work.add_argument(
        "--trace",
        type=Path,
        help="JSON lines: arrival_s, prompt_tokens, output_tokens; replaces all of the above",
    )
    work.add_argument("--seed", type=int, default=0)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=int, default=64)
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048)
    engine.add_argument("--num-kv-blocks", type=int, default=4096)
    engine.add_argument("--block-size", type=int, default=64)
    engine.add_argument("--admission-policy", choices=ADMISSION_POLICIES)
    engine.add_argument("--admission-cadence", type=int, default=2)
    engine.add_argument("--level-wait-weight", type=int, default=4)
    engine.add_argument("--level-hold-per-rank", type=int, default=16)
    cost = parser.add_argument_group("duration of a step")
    cost.add_argument("--step-us", type=float, default=5000, help="constant")
    cost.add_argument("--decode-us", type=float, default=100, help="per decode")
    cost.add_argument("--kv-token-us", type=float, default=0.01, help="per token attended to")
    cost.add_argument("--prefill-token-us", type=float, default=20, help="per prefill token")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw timeline and CDFs")


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Return the workload that the command line describes."""
    if arguments.trace is not None:
        return read_trace(arguments.trace)
    rng = random.Random(arguments.seed)
    requests = draw_requests(arguments.requests, arguments.prompt, arguments.output, rng)
    if arguments.concurrency:
        return closed_loop(requests, arguments.concurrency)
    if arguments.burst:
        return burst(requests, arguments.rate, arguments.burst, arguments.burst_at, rng)
    return poisson(requests, arguments.rate, rng)


def engine_of(arguments: argparse.Namespace) -> EngineShape:
    """Return the limits of one engine."""
    limits = SchedulerConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        admission_policy=arguments.admission_policy,
        admission_cadence=arguments.admission_cadence,
        level_wait_weight=arguments.level_wait_weight,
        level_hold_per_rank=arguments.level_hold_per_rank,
    )
    return EngineShape(limits, arguments.num_kv_blocks, arguments.block_size)


def costs_of(arguments: argparse.Namespace) -> CostModel:
    """Return how long steps take."""
    return CostModel(
        round(arguments.step_us * 1000),
        round(arguments.decode_us * 1000),
        round(arguments.kv_token_us * 1000),
        round(arguments.prefill_token_us * 1000),
    )


def _router_of(arguments: argparse.Namespace) -> Router:
    if arguments.routing_policy == "fewest-requests":
        return FewestRequests()
    return ByPolicy(ROUTING_POLICIES[arguments.routing_policy](0))


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """Show how far a simulation is, and how long it will take."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        yield progress


def simulate(arguments: argparse.Namespace, console: Console) -> Recorder:
    """Run one simulation and print its numbers."""
    workload = workload_of(arguments)
    simulation: Fleet | LockstepGroup
    expected = workload.arrivals_ns[-1] if workload.arrivals_ns else 60 * NS
    sample_every = max(1, expected // TIMELINE_POINTS)
    if arguments.command == "fleet":
        shape = FleetShape(
            arguments.engines,
            arguments.front_ends,
            engine_of(arguments),
            costs_of(arguments),
            arguments.hop_us * 1000,
            arguments.publish_interval,
            arguments.routing_policy,
        )
        simulation = Fleet(shape, workload, seed=arguments.seed, sample_every_ns=sample_every)
        title = f"{shape.engines} engines, {shape.front_ends} front ends"
    else:
        shape_of_rank = engine_of(arguments)
        simulation = LockstepGroup(
            arguments.ranks,
            shape_of_rank,
            costs_of(arguments),
            workload,
            route=_router_of(arguments),
            gather_first=arguments.gather_first,
            sample_every_ns=sample_every,
        )
        policy = arguments.admission_policy or "default policy"
        title = f"lockstep group of {arguments.ranks}, {policy}"
    # Millions of small objects that live to the end: looking for garbage among them takes longer
    # than making them.
    gc.disable()
    began = time.perf_counter()
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("requests", total=len(workload.requests))
            recorder = simulation.run(lambda finished: progress.update(task, completed=finished))
    finally:
        gc.enable()
    wall = time.perf_counter() - began
    console.print(summary_table(summarize(recorder), title))
    console.print(f"simulated in {wall:.1f} s, {recorder.tokens / wall:,.0f} tokens per second")
    return recorder


def simulate_c1(output: Path, console: Console) -> bool:
    """Run the calibrated group, write its page and plot; return whether every check passed."""
    everything = list(cases())
    means: dict[Case, Mean] = {}
    published: dict[str, Recorder] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("runs", total=len(everything) * len(STREAMS))
        for case in everything:
            progress.update(task, description=", ".join(filter(None, case)))
            runs: list[Run] = []
            for seed in STREAMS:
                runs.append(run_case(case, seed))
                progress.advance(task)
            means[case] = mean_of(runs)
            if case in DRAWN:
                published[case.policy] = runs[0].recorder
    found = checks(means)
    for check in found:
        mark = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
        console.print(f"{mark} {check.load}: {check.demand}: {check.measured}", highlight=False)
    figure = output / "balance-results.png"
    draw_calibration(means, published, figure)
    page = calibration_page(means, found, figure.name)
    (output / "balance-results.md").write_text(page, encoding="utf-8")
    console.print(f"wrote {output / 'balance-results.md'} and {figure}")
    return all(check.passed for check in found)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parsed = parse_arguments(arguments)
    console = Console()
    try:
        if parsed.command == "c1":
            writable_directory(parsed.output)
            load_pyplot()
            return 0 if simulate_c1(parsed.output, console) else 1
        if parsed.plot is not None:
            writable_file(parsed.plot)
            load_pyplot()
        recorder = simulate(parsed, console)
    except (InvalidSpec, PlottingUnavailable, OSError) as error:
        console.print("error:", str(error), style="red", highlight=False, markup=False)
        return 2
    if parsed.plot is not None:
        draw_run(recorder, f"{parsed.command}, seed {parsed.seed}", parsed.plot)
        console.print(f"wrote {parsed.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
