"""Compares Swell and vLLM's CPU build, alternating, with the same weights and load.

python -m benchmarks.side_by_side --peer-python ~/peer/.venv/bin/python
python -m benchmarks.side_by_side --peer-python ... --case "0.4b 16/128 x1" --rounds 1
python -m benchmarks.side_by_side --list
python -m benchmarks.side_by_side --peer-python ... --sides vLLM "vLLM in Rust" "vLLM in Swell"

The last command compares front ends on vLLM engines: its own in Python, its own in Rust, and
Swell's, for which Swell must be installed in the peer's environment, too. `--swell-args
"--quantization int8"` measures Swell with 8-bit integers.

Each round starts every server once per model and number of engines, warms it up, and runs all cases
of that model with `swell bench`, alternating sides. After every server all measurements are written
to NAME.json, so that nothing is lost if it is stopped, the table of medians and ratios to NAME.md,
and vLLM's output to NAME.log. With --add the runs of an existing NAME.json are included, so a long
comparison can be split up. docs/performance.md describes how to create the peer's environment.
"""

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
from rich.console import Console

from benchmarks.make_model import SHAPES, write_model
from benchmarks.running_stack import RunningStack, StackFailed, swell_bench
from engine.kernels.processor import kind
from engine.shared.writable import writable_directory, writable_file

PEER, SWELL = "vLLM", "Swell"
RUST, HOSTED = "vLLM in Rust", "vLLM in Swell"
SIDES = (PEER, SWELL, RUST, HOSTED)
MODEL_NAME = "bench"
"""Model name in requests."""
START_SECONDS = 600.0
"""vLLM compiles the model with torch."""
_KV_BYTES = 2 << 30


class Case(NamedTuple):
    """One row of the table."""

    name: str
    model: str
    """Shape name of `benchmarks.make_model`."""
    prompt: int
    output: int
    streams: int
    requests: int
    metric: str
    """Field of the result of `swell bench`."""
    unit: str
    aim: str
    """Target for Swell, in words."""
    engines: tuple[int, ...] = (1,)
    """Data-parallel sizes to try; the best one of each side counts."""
    lower_is_better: bool = False
    stream: bool = True


_OUT, _ALL, _TPOT = "output_throughput", "total_token_throughput", "mean_tpot_ms"
CASES = (
    Case("0.4b 16/128 x16", "0.4b", 16, 128, 16, 16, _OUT, "output tok/s", ">= 1.05x"),
    Case("0.4b 128/64 x16", "0.4b", 128, 64, 16, 16, _OUT, "output tok/s", ">= 1.1x"),
    Case("0.4b 512/8 x8", "0.4b", 512, 8, 8, 8, _ALL, "total tok/s", ">= 1.05x"),
    Case(
        "0.4b 16/128 x1", "0.4b", 16, 128, 1, 1, _TPOT, "ms per token", ">= 1.1x",
        lower_is_better=True,
    ),
    Case("2-layer 128/128 x64", "2-layer", 128, 128, 64, 192, _OUT, "output tok/s", ">= 3.2x"),
    Case(
        "2-layer 100/128 x64", "2-layer", 100, 128, 64, 768, _OUT, "output tok/s", ">= 3.2x",
        engines=(1, 2),
    ),
    Case(
        "2-layer 100/1 x64, whole answers", "2-layer", 100, 1, 64, 4096, "request_throughput",
        "requests/s", ">= 3x", engines=(1, 2), stream=False,
    ),
)  # fmt: skip
DETAILS = {
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "p99",
    "median_itl_ms": "ITL p50, ms",
    "p99_itl_ms": "p99",
    "cpu_ms_per_token": "processor ms per token",
}
"""Further results of a streaming run, and their headings. CPU time is that of all server processes,
per output token."""
WARM_UPS = {"0.4b": 16, "2-layer": 64}
"""Requests to each server before measuring."""


class Run(msgspec.Struct, frozen=True):
    """One case on one server in one round; `value` is in the unit of the case."""

    case: str
    side: str
    engines: int
    round: int
    value: float
    details: dict[str, float] = {}
    """Values of `DETAILS`."""


class Start(msgspec.Struct, frozen=True):
    """One start of one server."""

    side: str
    model: str
    engines: int
    round: int
    seconds: float
    resident_mb: float
    """After its load; all processes, with shared memory counted once."""


class Results(msgspec.Struct):
    """All measurements."""

    machine: str
    versions: dict[str, str]
    began: str
    """Start of the first round, date and time."""
    commit: str
    """Commit of Swell; ends with `-dirty` if files differed from it."""
    runs: list[Run] = []
    starts: list[Start] = []
    failures: list[str] = []


# -- servers and loads -----------------------------------------------------------------------------


def start_server(side: str, model: Path, engines: int, options: argparse.Namespace) -> RunningStack:
    """Return the server of a side, not yet entered."""
    flags = [str(model), "--served-model-name", MODEL_NAME, "--host", "127.0.0.1"]
    flags += ["--data-parallel-size", str(engines), "--max-model-len", "2048"]
    flags += ["--no-enable-prefix-caching"]
    if side == HOSTED:
        flags += ["--engine-backend", "vllm", "--engine-python", str(options.peer_python)]
    if side not in (PEER, RUST):
        flags += ["--kv-cache-memory-bytes", str(_KV_BYTES), *options.swell_args.split()]
        return RunningStack(*flags, timeout=START_SECONDS)
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // engines)
    parts = [cores[first : first + share] for first in range(0, share * engines, share)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(f"{part[0]}-{part[-1]}" for part in parts),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES >> 30),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_RUST_FRONTEND": str(int(side == RUST)),
    }
    return RunningStack(
        *flags, *options.peer_args.split(), timeout=START_SECONDS, environment=environment,
        program=options.peer_python.with_name("vllm"), log=options.peer_log,
    )  # fmt: skip


def measure(case: Case, url: str, seed: int) -> dict[str, Any]:
    """Load a server; return the result of `swell bench`.

    Raises:
        StackFailed: not every request was answered in full.
    """
    flags = [] if case.stream else ["--no-stream"]
    found = swell_bench(
        url, "--model", MODEL_NAME, "--random-input-len", str(case.prompt),
        "--random-output-len", str(case.output), "--num-prompts", str(case.requests),
        "--max-concurrency", str(case.streams), "--num-warmups", str(WARM_UPS[case.model]),
        "--ignore-eos", "--seed", str(seed), *flags,
    )  # fmt: skip
    if found["completed"] != case.requests:
        raise StackFailed(f"{found['completed']} of {case.requests} requests: {found['errors']}")
    return found


def visit(
    side: str, cases: list[Case], engines: int, number: int, results: Results,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Start one server, run all cases of one model, stop it; record failures."""
    model = options.models / cases[0].model
    if not (model / "model.safetensors").is_file():
        write_model(model, SHAPES[cases[0].model])
    try:
        with start_server(side, model, engines, options) as server:
            started = f"{side}, {model.name}, {engines} engine(s), ready {server.ready_after:.1f} s"
            print(f"round {number + 1}: {started}")
            top = psutil.Process(server.process.pid)
            processes = [top, *top.children(recursive=True)]
            for case in cases:
                # A new seed: no server can have seen the prompts.
                used = _cpu_seconds(processes)
                found = measure(case, server.url, time.time_ns() % (1 << 30))
                used = _cpu_seconds(processes) - used
                found["cpu_ms_per_token"] = 1000 * used / found["total_output_tokens"]
                details = {name: found[name] for name in DETAILS if name in found}
                value = float(found[case.metric])
                print(f"  {case.name}: {value:,.1f} {case.unit}")
                results.runs.append(Run(case.name, side, engines, number, value, details))
            memory = sum(map(_proportional_bytes, processes)) / 1e6
            results.starts.append(
                Start(side, model.name, engines, number, server.ready_after, memory)
            )
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            process.kill()
    except StackFailed as error:
        if not options.keep_going:
            raise
        results.failures.append(f"{side}, {model.name}: {error}")
        print(f"failed: {error}", file=sys.stderr)


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [each.cpu_times() for each in processes if each.is_running()]
    return sum(each.user + each.system for each in times)


def _proportional_bytes(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except psutil.Error:  # it has just exited
        return 0.0


def compare(options: argparse.Namespace, results: Results) -> None:
    """Run all rounds, writing the results after each server.

    Every other round is reversed, so that no side always follows the same one.
    """
    cases = [case for case in CASES if not options.case or case.name in options.case]
    first = 1 + max((start.round for start in results.starts), default=-1)
    for number in range(first, first + options.rounds):
        for model in dict.fromkeys(case.model for case in cases):
            of_model = [case for case in cases if case.model == model]
            for engines in sorted({n for case in of_model for n in case.engines}):
                chosen = [case for case in of_model if engines in case.engines]
                for side in options.sides[:: -1 if number % 2 else 1]:
                    visit(side, chosen, engines, number, results, options)
                    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
                    options.output.with_suffix(".json").write_bytes(encoded)
                    options.output.with_suffix(".md").write_text(as_markdown(results))


# -- tables ----------------------------------------------------------------------------------------


class Median(NamedTuple):
    """Median of a side in a case, with its best number of engines."""

    value: float
    lowest: float
    highest: float
    engines: int


def best(results: Results, case: Case, side: str) -> Median | None:
    """Return the best median of a side; None without runs."""
    found = []
    for engines in case.engines:
        values = [
            run.value
            for run in results.runs
            if (run.case, run.side, run.engines) == (case.name, side, engines)
        ]
        if values:
            found.append(Median(statistics.median(values), min(values), max(values), engines))
    choose = min if case.lower_is_better else max
    return choose(found, key=lambda each: each.value, default=None)


def as_markdown(results: Results) -> str:
    """Return the environment, and the tables of rates and of starts."""
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    rounds = len({start.round for start in results.starts})
    measured = {run.side for run in results.runs}
    others = [side for side in SIDES if side in measured and side != PEER]
    rows = [["load", "unit", PEER]]
    for side in others:
        rows[0] += [side, "ratio"]
    rows[0].append("aim")
    for case in CASES:
        found = [best(results, case, side) for side in (PEER, *others)]
        if not any(found):
            continue
        theirs = found[0]
        row = [case.name, case.unit, _cell(case, theirs)]
        for ours in found[1:]:
            ratio = ""
            if ours and theirs:
                how_many = ours.value / theirs.value
                ratio = f"{1 / how_many if case.lower_is_better else how_many:.2f}x"
            row += [_cell(case, ours), ratio]
        rows.append([*row, case.aim])
    details = [["load", "server", "engines", *DETAILS.values()]]
    for name, side, engines in {(r.case, r.side, r.engines): None for r in results.runs}:
        measured_runs = [
            r.details
            for r in results.runs
            if (r.case, r.side, r.engines) == (name, side, engines) and r.details
        ]
        if measured_runs:
            medians = []
            for detail in DETAILS:
                values = [each[detail] for each in measured_runs if detail in each]
                medians.append(f"{statistics.median(values):.3g}" if values else "")
            details.append([name, side, str(engines), *medians])
    starts = [["model", "server", "engines", "ready after, s", "resident MB after the load"]]
    for model, side, engines in {(s.model, s.side, s.engines): None for s in results.starts}:
        of_group = [
            s for s in results.starts if (s.model, s.side, s.engines) == (model, side, engines)
        ]
        seconds = statistics.median(each.seconds for each in of_group)
        memory = statistics.median(each.resident_mb for each in of_group)
        starts.append([model, side, str(engines), f"{seconds:.1f}", f"{memory:,.0f}"])
    text = f"## {results.began} UTC, commit {results.commit}\n\n{results.machine}; {versions}. "
    text += f"Medians of {rounds} rounds (lowest to highest).\n\n"
    text += f"{_table(rows)}\n{_table(details)}\n{_table(starts)}"
    return text + "".join(f"\nfailed: {failure.splitlines()[0]}\n" for failure in results.failures)


def _cell(case: Case, median: Median | None) -> str:
    if median is None:
        return ""
    digits = 1 if median.value < 100 else 0
    value, lowest, highest = (f"{each:,.{digits}f}" for each in median[:3])
    engines = f", DP={median.engines}" if len(case.engines) > 1 else ""
    return f"{value} ({lowest} to {highest}){engines}"


def _table(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# -- the command -----------------------------------------------------------------------------------


def read_results(options: argparse.Namespace) -> Results:
    """Return the results to continue from."""
    path: Path = options.output.with_suffix(".json")
    if options.add and path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=Results)
    program = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'))"
    done = subprocess.run(
        [options.peer_python, "-c", program], capture_output=True, text=True, check=True
    )
    peer, peer_torch = done.stdout.split()
    versions = {
        SWELL: f"{version('swell')} (torch {version('torch')})",
        PEER: f"{peer} (torch {peer_torch})",
    }
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return Results(
        machine(Path("/proc/cpuinfo").read_text("utf-8")), versions, began, commit or "?"
    )


def machine(cpuinfo: str) -> str:
    """Return the number of cores available, and the name and kind of the first processor."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    # Processors with equal names differ in these numbers.
    numbers = {"cpu family": "family", "model": "model", "CPU part": "part"}
    shown = [f"{label} {fields[name]}" for name, label in numbers.items() if name in fields]
    name = ", ".join([fields.get("model name", platform.machine()), *shown])
    return f"{len(os.sched_getaffinity(0))} cores {name} ({kind()})"


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument("--peer-python", type=Path, help="interpreter of the peer's environment")
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=(PEER, SWELL))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("build/bench-models"))
    parser.add_argument("--output", type=Path, default=Path("build/side_by_side"))
    parser.add_argument("--add", action="store_true", help="count the runs of --output, too")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--swell-args", default="", help="more flags for `swell serve`")
    parser.add_argument("--peer-args", default="", help="more flags for `vllm serve`")
    options = parser.parse_args()
    if unknown := set(options.case or ()) - {case.name for case in CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; see --list")
    if not options.list and options.peer_python is None:
        parser.error("--peer-python is needed")
    return options


def main() -> int:
    """Compare, print, write."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that the servers' context managers run
    options = parse_arguments()
    if options.list:
        for case in CASES:
            print(f"{case.name}  ({case.unit}, {case.aim})")
        return 0
    for suffix in (".json", ".md", ".log"):
        writable_file(options.output.with_suffix(suffix))
    options.models = writable_directory(options.models).absolute()
    options.peer_python = options.peer_python.absolute()
    results = read_results(options)
    print(results.machine)
    with options.output.with_suffix(".log").open("wb") as log:
        options.peer_log = log.fileno()
        compare(options, results)
    Console().print(as_markdown(results), soft_wrap=True, markup=False)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
