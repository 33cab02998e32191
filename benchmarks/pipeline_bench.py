"""How busy the stages of a pipeline are: simulated, and in real processes on this machine.

python -m benchmarks.pipeline_bench --stages 2 --streams 32

Real stages compute a model of random weights with one thread each. A stage is busy while its thread
runs, and while it could but other work has the cores, as Linux's scheduler counts both
(/proc/PID/task/TID/schedstat): what is missing to 100 % is spent waiting for another stage. How
much of the time it had a core is told beside that.
"""

import argparse
import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from engine.core.engine_core import EngineCore
from engine.executor.environment import settle_environment
from engine.executor.interface import Executor
from engine.executor.simulated import SimulatedExecutor
from engine.executor.team import Team
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AddRequest, SamplingParams

PROMPT = 16
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


class Run(NamedTuple):
    """One way of running the steps."""

    name: str
    rate: float
    """Tokens per second while all streams ran."""
    busy: list[float]
    """Share of the time that each stage computed, or could have with a core of its own."""
    ran: list[float]
    """Share of the time that it had a core."""


def settings(model: Path, stages: int, streams: int, *, overlap: bool = False) -> EngineConfig:
    """Return an engine's settings."""
    return EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy", dtype="float32", device="cpu"),
        cache=CacheConfig(num_kv_blocks=32 * streams),
        scheduler=SchedulerConfig(max_num_seqs=streams, async_scheduling=overlap),
        executor=ExecutorConfig(threads=stages, simulated_step_us=20_000),
        parallel=ParallelConfig(data_parallel_size=1, pipeline_parallel_size=stages),
    )


def start(config: EngineConfig, executor: Executor, streams: int, tokens: int) -> EngineCore:
    """Return an engine in which all streams decode."""
    core = EngineCore(config, executor, rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    for id in range(streams):
        sampling = SamplingParams(max_tokens=tokens, seed=id, temperature=0.0, ignore_eos=True)
        prompt = [(7 * id + i) % 8000 for i in range(PROMPT)]
        core.handle(AddRequest(id, str(id), 0, 0, prompt, sampling))
    for _ in range(4 * executor.info.num_stages):
        core.step()
    return core


def decode(core: EngineCore, streams: int) -> int:
    """Step until the first stream ends; return how many tokens were made."""
    tokens = 0
    while core.stats().running == streams:
        tokens += sum(len(o.token_ids) for each in core.step().outputs.values() for o in each)
    return tokens


def simulated(config: EngineConfig, name: str, streams: int, tokens: int) -> Run:
    """Run stages whose steps take 20 ms and 10 us per token."""
    executor = SimulatedExecutor(config, timing="virtual")
    core = start(config, executor, streams, tokens)
    times, before = executor.times, list(executor.times.busy)
    began = times.now()
    made = decode(core, streams)
    seconds = times.now() - began
    busy = [(now - then) / seconds for now, then in zip(times.busy, before, strict=True)]
    return Run(name, made / seconds, busy, busy)


def real(config: EngineConfig, name: str, streams: int, tokens: int) -> Run:
    """Run stages in processes of this machine."""
    settle_environment(config.parallel.processes)
    processes = [psutil.Process()]
    if config.parallel.processes == 1:
        from engine.executor.in_process import InProcessExecutor

        executor: Executor = InProcessExecutor(config)
    else:
        from engine.executor.multi_process import MultiProcessExecutor

        team = Team(config, 0, 1)
        executor = MultiProcessExecutor(config, team)
        processes = [*map(psutil.Process, team.pids), processes[0]]
    try:
        core = start(config, executor, streams, tokens)
        before, began = [_times(each) for each in processes], time.monotonic()
        made = decode(core, streams)
        seconds = time.monotonic() - began
        spent = [_spent(each, then) for each, then in zip(processes, before, strict=True)]
    finally:
        executor.shutdown()
    ran = [each[0] / seconds for each in spent]
    return Run(name, made / seconds, [sum(each) / seconds for each in spent], ran)


def _times(process: psutil.Process) -> dict[str, tuple[float, float]]:
    """Return how many seconds each thread ran, and waited for a core."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(FileNotFoundError):  # it has just ended
            ran, waited, _ = (task / "schedstat").read_text().split()
            found[task.name] = int(ran) / 1e9, int(waited) / 1e9
    return found


def _spent(process: psutil.Process, before: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Return the seconds since then of the thread that had most to do."""
    spent = []
    for thread, (ran, waited) in _times(process).items():
        ran_before, waited_before = before.get(thread, (0.0, 0.0))
        spent.append((ran - ran_before, waited - waited_before))
    return max(spent, key=sum)


def main() -> None:
    """Run all ways in turn and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60, help="of each stream")
    arguments = parser.parse_args()
    stages, streams = arguments.stages, arguments.streams
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        (model / "config.json").write_text(json.dumps(_MODEL))
        alone, full = settings(model, 1, streams), settings(model, stages, streams)
        ahead = settings(model, stages, streams, overlap=True)
        ways = [
            (f"{stages} stages, {stages} steps in flight", full),
            (f"{stages} stages, {stages + 1} steps in flight", ahead),
        ]
        runs = [simulated(config, f"simulated, {name}", streams, 200) for name, config in ways]
        for name, config in [("one process", alone), *ways]:
            runs.append(real(config, name, streams, arguments.tokens))
    table = Table("way", "tokens/s", "busy, by stage", "had a core")
    for run in runs:
        shares = (", ".join(f"{share:.0%}" for share in each) for each in (run.busy, run.ran))
        table.add_row(run.name, f"{run.rate:.0f}", *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
