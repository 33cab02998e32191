"""Compares kernels with torch's operators on this kind of processor.

python -m benchmarks.kernel_choice
python -m benchmarks.kernel_choice --model 2-layer --rounds 3

Products, attention and whole steps are computed alternately in both ways; reported are the medians
of the rounds. The last line is the resulting row of `engine.kernels.processor.MEASURED`, or states
that there should be none. It takes three minutes; run it on an idle machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.executor.environment import configure_environment

OUTPUTS, INPUTS, MATRICES = 9728, 896, 8
"""Shape of products; together the weights exceed the caches."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 14, 2, 64, 16
ROWS = (1, 8, 16, 32, 64, 128, 512)
DECODES = ((16, 140), (16, 1024))
"""Number of decodes, and keys of each."""
PROMPTS = (40, 512, 2048)
_LEVEL = 1.03
"""Allowed slowdown of a kernel, since its bits for a row do not depend on the step."""


class Pair(NamedTuple):
    """Seconds of one operation in both ways."""

    name: str
    size: int
    kernel: float
    stock: float

    @property
    def is_level(self) -> bool:
        return self.kernel <= _LEVEL * self.stock


class Findings(NamedTuple):
    """All comparisons; empty if there is no kernel."""

    products: Sequence[Pair]
    decodes: Sequence[Pair]
    prompts: Sequence[Pair]
    steps: Sequence[Pair]


def in_turn(kernel: Callable[[], Any], stock: Callable[[], Any], rounds: int) -> tuple[float, ...]:
    """Return the medians of both."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):
        for function, taken in zip((kernel, stock), times, strict=True):
            started_at = time.perf_counter()
            function()
            taken.append(time.perf_counter() - started_at)
    return tuple(statistics.median(taken[1:]) for taken in times)


def compare_products(rounds: int) -> Iterator[Pair]:
    """Compare products of several matrices for each number of rows."""
    import torch

    from engine.kernels.registry import has_product_kernel
    from engine.models.products.dense import PackedLinear

    if not has_product_kernel():
        return
    weights = [torch.randn(OUTPUTS, INPUTS).bfloat16() * INPUTS**-0.5 for _ in range(MATRICES)]
    kernels, stock = ([PackedLinear(weight, None) for weight in weights] for _ in range(2))
    for product, weight in zip(kernels, weights, strict=True):
        product.use_kernel(weight, by_rows=True)
        if not product.is_row_independent:
            return

    def all_of(products: list[PackedLinear], x: Any) -> None:
        for product in products:
            product(x)

    for rows in ROWS:
        x = torch.randn(rows, INPUTS).bfloat16()
        yield Pair(
            "product",
            rows,
            *in_turn(partial(all_of, kernels, x), partial(all_of, stock, x), rounds),
        )


def compare_attention(rounds: int) -> tuple[list[Pair], list[Pair]]:
    """Compare decodes and prompts, if there is a kernel for them."""
    import torch

    from engine.kernels.cpu.avx512 import has_pairs
    from engine.kernels.processor import float32_is_faster
    from engine.models.attention.interface import Heads
    from engine.models.attention.paged import PagedAttention
    from engine.models.attention.patches import PatchAttention
    from engine.models.attention.rows import AttentionRows

    heads = Heads(HEADS, KV_HEADS, HEAD_DIM)
    dtype = torch.bfloat16
    stock = PagedAttention(heads, dtype=dtype, device=torch.device("cpu"))
    if not has_pairs() or float32_is_faster():
        return [], []
    kernel = PatchAttention(heads)

    def compare(name: str, rows: int, starts: int, count: int) -> Pair:
        blocks = -(-(starts + count) // BLOCK_SIZE)
        step = AttentionRows(
            starts=np.full(rows, starts),
            counts=np.full(rows, count),
            first_token=np.arange(rows) * count,
            block_tables=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
            block_size=BLOCK_SIZE,
        )
        queries = torch.randn(rows * count, HEADS, HEAD_DIM).to(dtype)
        cache = torch.randn(rows * blocks, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM).to(dtype)

        def attend(attention: Any) -> None:
            attention.attend(queries, cache, attention.plan(step, None))

        times = in_turn(partial(attend, kernel), partial(attend, stock), 4 * rounds)
        return Pair(name, starts + count, *times)

    decodes = [compare(f"{rows} decodes, keys", rows, keys - 1, 1) for rows, keys in DECODES]
    prompts = [compare("prompt", 1, 0, tokens) for tokens in PROMPTS]
    return decodes, prompts


def compare_steps(model: str, rounds: int) -> list[Pair]:
    """Compare decode steps and prefills of a whole model, with and without kernels."""
    from benchmarks.engine_bench import command_line, measure

    found: dict[str, tuple[list[float], list[float]]] = {}
    arguments = [model, "--rows", "1", "16", "--prompt", "64", "--steps", "24", "--prefills", "3"]
    for _ in range(rounds):
        for which, flags in enumerate(([], ["--enforce-eager"])):
            options = command_line().parse_args([*arguments, *flags])
            for name, parts in measure(options).items():
                found.setdefault(name, ([], []))[which].append(parts["all"]["step"])
    return [
        Pair(name, int(name.split()[1]), statistics.median(kernel), statistics.median(stock))
        for name, (kernel, stock) in found.items()
    ]


def chosen(findings: Findings) -> tuple[int, bool] | None:
    """Return up to how many rows products are at least level, and whether prompts are.

    None if a decode, alone or within a step, is slower with kernels: then none are used.
    """
    from engine.kernels.processor import ALL_ROWS

    steps = [pair for pair in findings.steps if pair.name.startswith("decode")]
    if not all(pair.is_level for pair in (*findings.decodes, *steps)):
        return None
    rows = ALL_ROWS if findings.products else 0
    for before, pair in zip((None, *findings.products), findings.products, strict=False):
        if not pair.is_level:
            rows = 0 if before is None else before.size
            break
    return rows, bool(findings.prompts) and all(pair.is_level for pair in findings.prompts)


@contextmanager
def all_kernels() -> Iterator[None]:
    """Enable all kernels that exist for this kind of processor."""
    from engine.kernels import processor
    from engine.kernels.processor import kind

    before = processor.MEASURED
    processor.MEASURED = {kind(): processor.FasterKernels(processor.ALL_ROWS, True)}
    try:
        yield
    finally:
        processor.MEASURED = before


def measure_all(model: str, rounds: int) -> Findings:
    """Run all comparisons."""
    with all_kernels():
        products = list(compare_products(rounds))
        decodes, prompts = compare_attention(rounds)
        return Findings(products, decodes, prompts, compare_steps(model, rounds))


def report(findings: Findings) -> None:
    """Print the comparisons, and the resulting row."""
    from engine.kernels.processor import ALL_ROWS, MEASURED, kind

    table = Table("work", "size", "kernel ms", "torch ms", "ratio", title=f"processor: {kind()}")
    for pair in (pair for part in findings for pair in part):
        table.add_row(
            pair.name,
            str(pair.size),
            f"{pair.kernel * 1e3:.3f}",
            f"{pair.stock * 1e3:.3f}",
            f"{pair.kernel / pair.stock:.2f}",
        )
    Console(width=100).print(table)
    row = chosen(findings)
    text = "none: torch's operators serve"
    if row is not None:
        rows = "ALL_ROWS" if row[0] == ALL_ROWS else row[0]
        text = f"Kind.{kind().name}: FasterKernels(product_rows={rows}, prompt_attention={row[1]})"
    print(f"found: {text}\nin use: {MEASURED.get(kind(), 'none')}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.4b", help="whose steps are compared: 0.4b or 2-layer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    configure_environment()
    report(measure_all(options.model, options.rounds))


if __name__ == "__main__":
    main()
