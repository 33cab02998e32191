"""Checks and benchmarks a GPU machine in one command, in less than eight minutes.

    python -m benchmarks.gpu_check
    python -m benchmarks.gpu_check --device cpu --small     all parts in miniature, without a GPU

Runs the CUDA tests, compares tokens, measures decode steps against memory bandwidth, prefills
against matrix products, the start of a stack and a served load. Each part is a separate process
with a time limit, so that failures are isolated. Writes gpu_check.json and, for the documentation,
gpu-check.md.
"""

import argparse
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.running_stack import RunningStack, swell_bench
from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.models.hf_config import read_spec
from engine.models.spec import ModelSpec
from engine.shared.config import (
    BUNDLED_MODEL,
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AddRequest, SamplingParams

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SMALL = {
    **LLAMA_8B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
Device = Literal["cuda", "cpu"]
_ROOT = Path(__file__).parents[1]
_SERVED_SECONDS = 140.0
"""For the start of the stack, and again for its load."""
COPIES = 20
"""Number of memory copies to measure bandwidth."""
TOTAL_SECONDS = 470.0
"""Limit for all parts together: eight minutes, minus the writing of results."""
PAGE_HEAD = """# GPU check

`python -m benchmarks.gpu_check` runs what needs a GPU in one command of less than eight minutes:
the CUDA tests, comparisons of tokens, decode steps against the bandwidth of a copy, prefills
against the rate of a matrix product, the start of a stack and a served load. `--device cpu --small`
runs all parts in miniature.
"""
SERVED_FIGURES = (
    "completed", "failed", "output_throughput",
    "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms",
)  # fmt: skip
"""Fields kept of the result of `swell bench`."""


class Setup(NamedTuple):
    """Settings of all parts."""

    device: Device
    small: bool
    directory: Path
    """Contains the config of a model with random weights in the shape of Llama 3 8B."""

    @property
    def batches(self) -> list[int]:
        """Numbers of sequences that decode at once."""
        return [1, 4] if self.small else [1, 16, 64, 256]

    def core(
        self,
        *,
        eager: bool = False,
        invariant: bool = False,
        tokens: int = 8192,
        seqs: int = 256,
    ) -> EngineCore:
        """Return an engine for the model with random weights."""
        model = ModelConfig(
            model=str(self.directory),
            load_format="dummy",
            dtype="bfloat16",
            device=self.device,
            max_model_len=1024 if self.small else None,
        )
        cache = CacheConfig(
            block_size=16 if self.small else 256,
            enable_prefix_caching=False,
            num_kv_blocks=400 if self.small else None,
        )
        scheduler = SchedulerConfig(
            max_num_seqs=8 if self.small else seqs,
            max_num_batched_tokens=512 if self.small else tokens,
        )
        executor = ExecutorConfig(
            enforce_eager=eager, batch_invariant=invariant and self.device == "cuda"
        )
        return _core(EngineConfig(model=model, cache=cache, scheduler=scheduler, executor=executor))


def _core(config: EngineConfig) -> EngineCore:
    core = EngineCore(config, InProcessExecutor(config), rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    return core


def greedy_tokens(core: EngineCore, count: int, tokens: int) -> list[list[int]]:
    """Return the engine's output for `count` prompts of different lengths."""
    for number in range(count):
        prompt = [(7 * number + 3 * i) % 250 for i in range(3 + 20 * number)]
        sampling = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0, ignore_eos=True)
        core.handle(AddRequest(number, str(number), 0, 0, prompt, sampling))
    tokens_of: list[list[int]] = [[] for _ in range(count)]
    while core.has_work:
        for outputs in core.step().outputs.values():
            for output in outputs:
                tokens_of[output.id] += output.token_ids
    return tokens_of


def agreement(some: list[list[int]], others: list[list[int]]) -> float:
    """Return the fraction of tokens before the first difference, over all sequences."""
    alike = 0
    for one, other in zip(some, others, strict=True):
        for a, b in zip(one, other, strict=True):
            if a != b:
                break
            alike += 1
    return alike / sum(map(len, some))


def files_of_cuda_tests() -> list[str]:
    """Return the files with device tests; others may import packages that are not installed."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(each) for each in files if "mark.cuda" in each.read_text(encoding="utf-8")]


def cuda_tests(setup: Setup) -> dict[str, Any]:
    """Run all tests that require a device."""
    where = ["tests/engine/executor/test_cuda.py"] if setup.small else files_of_cuda_tests()
    flags = ["-q", "-m", "cuda", "-o", "addopts=", "-p", "no:cacheprovider", *where]
    flags += ["-p", "no:benchmark"]  # which warns about xdist, and warnings are errors
    if find_spec("xdist"):  # they mostly wait for compilers
        flags += ["-n", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags], capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    lines = done.stdout.strip().splitlines()
    return {"passed": done.returncode == 0, "summary": lines[-1] if lines else done.stderr[-300:]}


def parity(setup: Setup) -> dict[str, Any]:
    """Compare the device's tokens with the CPU's, and those of recorded steps with eager ones."""

    def bundled(device: Device) -> list[list[int]]:
        config = EngineConfig(
            model=ModelConfig(
                model=str(BUNDLED_MODEL), dtype="float32", device=device, max_model_len=512
            ),
            cache=CacheConfig(num_kv_blocks=200, block_size=16),
            scheduler=SchedulerConfig(max_num_seqs=8),
        )
        return greedy_tokens(_core(config), 5, 16)

    shares = {"bundled model, float32": agreement(bundled(setup.device), bundled("cpu"))}
    recorded = greedy_tokens(setup.core(seqs=8, tokens=512), 4, 16)
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    eager = greedy_tokens(setup.core(seqs=8, tokens=512, eager=True), 4, 16)
    return {**shares, "graphs against eager, bfloat16": agreement(recorded, eager)}


def bytes_per_step(spec: ModelSpec, batch: int, context: int) -> int:
    """Return the bytes that a decode step of a dense 16-bit model has to read."""
    heads = spec.query_size * 2 + spec.kv_size * 2
    layer = spec.hidden_size * (heads + 3 * spec.intermediate_size)
    weights = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    keys_values = spec.num_layers * 2 * spec.kv_size * context
    return 2 * (weights + batch * keys_values)


def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Return the bytes per second read and written by a memory copy on the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    started_at = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    synchronize(device)
    return 2 * num_bytes * COPIES / (time.perf_counter() - started_at)


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def decode_seconds(core: EngineCore, batch: int, prompt: int, tokens: int) -> float:
    """Return the mean seconds of the steps in which the whole batch decodes."""
    source = random.Random(batch)
    for number in range(batch):
        ids = [source.randrange(core.operations.vocab_size) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=tokens, seed=number, temperature=0.0, ignore_eos=True)
        core.handle(AddRequest(number, str(number), 0, 0, ids, sampling))
    while core.stats().queued_prefill_tokens or core.stats().waiting:
        core.step()
    for _ in range(5):  # the first ones record
        core.step()
    steps, started_at = 0, time.perf_counter()
    while core.stats().running == batch:
        core.step()
        steps += 1
    seconds = time.perf_counter() - started_at
    while core.has_work:
        core.step()
    return seconds / steps


def decode(setup: Setup, core: EngineCore | None = None) -> dict[str, Any]:
    """Measure decode steps against the time to read weights, keys and values.

    Of the embeddings, only one row per token is read.
    """
    core = core or setup.core()
    bandwidth = copy_bandwidth(setup.device, 2**22 if setup.small else 2**31)
    spec = read_spec(setup.directory)
    prompt, tokens = (8, 16) if setup.small else (128, 96)
    rows = {}
    for batch in setup.batches:
        seconds = decode_seconds(core, batch, prompt, tokens)
        bound = bytes_per_step(spec, batch, prompt + tokens // 2) / bandwidth
        rows[str(batch)] = {
            "step_ms": 1e3 * seconds, "tokens_per_s": batch / seconds, "of_bound": bound / seconds
        }  # fmt: skip
    return {"bandwidth_gb_s": bandwidth / 1e9, "batches": rows}


def operations_per_token(spec: ModelSpec) -> int:
    """Return the multiplications and additions of a dense model's layers per token."""
    heads = spec.query_size * 2 + spec.kv_size * 2
    return 2 * spec.num_layers * spec.hidden_size * (heads + 3 * spec.intermediate_size)


def product_rate(device: str, size: int, repeat: int = 10) -> float:
    """Return the operations per second of a product of two square bfloat16 matrices."""
    one = torch.randn(size, size, device=device).bfloat16()
    other = one.clone()
    one @ other
    synchronize(device)
    started_at = time.perf_counter()
    for _ in range(repeat):
        one @ other
    synchronize(device)
    return 2.0 * size**3 * repeat / (time.perf_counter() - started_at)


def prefill(setup: Setup, core: EngineCore | None = None) -> dict[str, Any]:
    """Measure steps full of prompt tokens against the rate of a matrix product."""
    core = core or setup.core()
    rate = product_rate(setup.device, 256 if setup.small else 8192)
    spec = read_spec(setup.directory)
    length, prompts = (64, 4) if setup.small else (2048, 8)
    seconds = 0.0
    for turn in range(2):  # the first one warms up
        for number in range(prompts):
            ids = [(number + 31 * i) % spec.vocab_size for i in range(length)]
            sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
            core.handle(AddRequest(number + prompts * turn, str(number), 0, 0, ids, sampling))
        started_at = time.perf_counter()
        while core.has_work:
            core.step()
        seconds = time.perf_counter() - started_at
    needed = operations_per_token(spec) * length * prompts / rate
    return {
        "product_tflop_s": rate / 1e12,
        "tokens_per_s": length * prompts / seconds,
        "of_bound": needed / seconds,
    }


def invariant(setup: Setup) -> dict[str, Any]:
    """Measure prefills and decode steps with --batch-invariant; on a CPU without it."""
    core = setup.core(invariant=True)
    return {"prefill": prefill(setup, core), "decode": decode(setup, core)}


def served(setup: Setup) -> dict[str, Any]:
    """Start a stack with one engine, and load it with `swell bench`.

    The model's vocabulary has the size of the bundled tokenizer, which it is served with.
    """
    directory = setup.directory / "served"
    directory.mkdir()
    shape = json.loads((setup.directory / "config.json").read_text())
    vocabulary = read_spec(BUNDLED_MODEL).vocab_size
    (directory / "config.json").write_text(json.dumps({**shape, "vocab_size": vocabulary}))
    for each in BUNDLED_MODEL.glob("tokenizer*.json"):
        shutil.copy(each, directory)
    flags = [str(directory), "--load-format", "dummy", "--device", setup.device]
    flags += ["--data-parallel-size", "1", "--log-level", "warning", "--dtype", "bfloat16"]
    flags += ["--max-model-len", "512", "--num-kv-blocks", "200"] if setup.small else []
    inputs, outputs, prompts, at_once = (16, 16, 8, 4) if setup.small else (128, 128, 512, 128)
    with RunningStack(*flags, timeout=_SERVED_SECONDS) as stack:
        found = swell_bench(
            stack.url, "--random-input-len", str(inputs), "--random-output-len", str(outputs),
            "--num-prompts", str(prompts), "--max-concurrency", str(at_once), "--num-warmups", "4",
            "--random-vocab-size", str(vocabulary), "--ignore-eos", timeout=_SERVED_SECONDS,
        )  # fmt: skip
    return {"start_s": stack.ready_after, **{name: found[name] for name in SERVED_FIGURES}}


PARTS: dict[str, tuple[Callable[[Setup], dict[str, Any]], float]] = {
    "tests": (cuda_tests, 120),
    "parity": (parity, 90),
    "decode": (decode, 90),
    "prefill": (prefill, 60),
    "invariant": (invariant, 90),
    "served": (served, 150),
}
"""Parts in order, with their time limits in seconds."""


def run_part(name: str, options: argparse.Namespace, directory: Path, limit: float) -> Any:
    """Run one part in a process; return its result, or an error.

    With --logs, its stderr is saved there.
    """
    if limit <= 0:
        return {"error": "no time was left"}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", options.device]
    command += ["--part", name, "--directory", str(directory)]
    try:
        done = subprocess.run(
            [*command, *(["--small"] if options.small else [])],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as ended:
        _keep_log(options.logs, name, ended.stderr or b"")
        return {"error": f"took more than {limit:.0f} s"}
    _keep_log(options.logs, name, done.stderr.encode())
    # Libraries print to stdout too.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip() or f"exit code {done.returncode}")[-600:]}
    return json.loads(lines[-1])


def _keep_log(directory: Path | None, name: str, printed: bytes) -> None:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.log").write_bytes(printed)


def machine(device: str) -> dict[str, str]:
    """Describe the machine."""
    name = platform.processor() or platform.machine()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else "none",
        "python": platform.python_version(),
    }


def page(report: dict[str, Any]) -> str:
    """Return the documentation page for a report."""
    lines = [PAGE_HEAD, "| part | what | result |", "|---|---|---|"]
    for part, found in report.items():
        lines += [f"| {part} | {what} | {value} |" for what, value in _flat(found)]
    return "\n".join(lines) + "\n"


def _flat(found: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(found, dict):
        return [
            row
            for key, value in found.items()
            for row in _flat(value, f"{name} {key}".strip().replace("_", " "))
        ]
    if isinstance(found, list):
        return []
    text = f"{found:.4g}" if isinstance(found, float) else " ".join(str(found).split())
    return [(name, text.replace("|", "/"))]


def main() -> int:
    """Run all parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, few tokens")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--logs", type=Path, help="directory for what the parts print")
    parser.add_argument("--page", type=Path, default=Path("gpu-check.md"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        setup = Setup(options.device, options.small, options.directory)
        print(json.dumps(PARTS[options.part][0](setup)))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --device cpu --small runs all parts in miniature")
    started_at = time.monotonic()
    report: dict[str, Any] = {"machine": machine(options.device)}
    with tempfile.TemporaryDirectory() as directory:
        shape = SMALL if options.small else LLAMA_8B
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        for name in options.parts:
            remaining = TOTAL_SECONDS - (time.monotonic() - started_at)
            print(f"{name} ...", file=sys.stderr, flush=True)
            report[name] = run_part(name, options, Path(directory), min(PARTS[name][1], remaining))
            print(json.dumps(report[name]), file=sys.stderr, flush=True)
    report["machine"]["seconds"] = f"{time.monotonic() - started_at:.0f}"
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    options.page.write_text(page(report))
    print(page(report))
    return int(any("error" in found for found in report.values()))


if __name__ == "__main__":
    sys.exit(main())
