"""Decode throughput on a CUDA device against what its memory allows.

python -m benchmarks.gpu_decode_bench --batches 1 16 64 256

One engine in this process with random weights in the shape of Llama 3 8B. A decode step has to
read every weight (of the embeddings only one row per token) and all keys and values of the batch;
that many bytes over the measured bandwidth of a copy is the bound. Needs a CUDA device.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.models.hf_config import read_spec
from engine.models.spec import ModelSpec
from engine.shared.config import (
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
_BYTES = 2
_COPIED = 2**31
"""Bytes."""
_COPIES = 20


def bytes_per_step(spec: ModelSpec, batch: int, context: int) -> int:
    """Return the bytes that a decode step of a dense model in 16 bits has to read."""
    heads = spec.query_size * 2 + spec.kv_size * 2
    layer = spec.hidden_size * (heads + 3 * spec.intermediate_size)
    weights = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    keys_values = spec.num_layers * 2 * spec.kv_size * context
    return _BYTES * (weights + batch * keys_values)


def copy_bandwidth(device: str = "cuda", num_bytes: int = _COPIED) -> float:
    """Return the bytes per second that the device reads and writes while it copies its memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source)
    synchronize(device)
    return 2 * num_bytes * _COPIES / (time.perf_counter() - began)


def synchronize(device: str) -> None:
    """Wait for all that the device was given to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def decode_seconds(core: EngineCore, batch: int, prompt: int, tokens: int) -> float:
    """Return the mean time of the steps in which the whole batch decodes."""
    source = random.Random(batch)
    for number in range(batch):
        ids = [source.randrange(core.operations.vocab_size) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=tokens, seed=number, temperature=0.0, ignore_eos=True)
        core.handle(AddRequest(number, str(number), 0, 0, ids, sampling))
    while core.stats().queued_prefill_tokens or core.stats().waiting:
        core.step()
    for _ in range(5):  # the first ones record
        core.step()
    steps, began = 0, time.perf_counter()
    while core.stats().running == batch:
        core.step()
        steps += 1
    seconds = time.perf_counter() - began
    while core.has_work:
        core.step()
    return seconds / steps


def rows(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the cells of one row per batch size."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LLAMA_8B))
        config = EngineConfig(
            model=ModelConfig(
                model=directory, load_format="dummy", dtype="bfloat16", device="cuda"
            ),
            cache=CacheConfig(block_size=options.block_size, enable_prefix_caching=False),
            scheduler=SchedulerConfig(
                max_num_seqs=max(options.batches), async_scheduling=options.overlap
            ),
            executor=ExecutorConfig(enforce_eager=options.eager),
        )
        core = EngineCore(config, InProcessExecutor(config), rank=0, incarnation=1)
        spec = read_spec(Path(directory))
    core.front_end_joined(0, 1)
    bandwidth = copy_bandwidth()
    yield "copy", f"{bandwidth / 1e9:.0f} GB/s", "", "", ""
    for batch in options.batches:
        seconds = decode_seconds(core, batch, options.prompt, options.tokens)
        context = options.prompt + options.tokens // 2
        needed = bytes_per_step(spec, batch, context)
        bound = needed / bandwidth
        yield (
            str(batch), f"{1e3 * seconds:.2f} ms", f"{batch / seconds:.0f}",
            f"{1e3 * bound:.2f} ms", f"{bound / seconds:.0%}",
        )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--overlap", action="store_true", help="plan steps ahead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    table = Table("batch", "step", "tok/s", "bound", "of the bound")
    for cells in rows(options):
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
