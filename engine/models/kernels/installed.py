"""Compiles kernels that come with an installation.

python -m engine.models.kernels.installed
python -m engine.models.kernels.installed avx512-bf16    # for Zen 4 and 5 alone

For images: what a container compiles is lost with it. Kernels are compiled for every target of
x86, or those that are named, whatever the processor here, and put beside the installed packages,
from where engines take those for theirs.
"""

# It needs no other module of the engine: a layer of an image with kernels stays when those change.
import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llvmlite import binding

from engine.models.kernels.architecture import is_x86
from engine.models.kernels.compiling import Kernel
from engine.models.kernels.kept import installed_directory
from engine.models.kernels.targets import X86_TARGETS, Target


class Heads(NamedTuple):
    """What attention is compiled for."""

    group: int
    """Query heads of each KV head."""
    head_dim: int
    kv_heads: int


COMMON_HEADS = (
    Heads(3, 32, 2),  # the bundled model
    Heads(7, 64, 2),  # Qwen 2.5 0.5B
    Heads(6, 128, 2),  # Qwen 2.5 1.5B
    Heads(2, 128, 8),  # Qwen 3 0.6B and 1.7B
    Heads(4, 128, 8),  # Qwen 3 4B and 8B, Llama 3 8B, Mistral 7B
    Heads(8, 128, 4),  # Qwen 3 30B-A3B
    Heads(4, 64, 8),  # Llama 3.2 1B
    Heads(3, 128, 8),  # Llama 3.2 3B
    Heads(8, 64, 8),  # gpt-oss
)
"""Of models that people serve on CPUs. Attention with others is compiled when a model is loaded."""


def kernels_for(target: Target, heads: Iterable[Heads]) -> Iterator[Kernel]:
    """Return what whole models in bfloat16 are computed with on processors of a target."""
    from engine.models.kernels import chosen_experts, draws, experts, filtered_draws, rows
    from engine.models.kernels.decode_attention import decode_attention
    from engine.models.kernels.pair_product import product as pair_product
    from engine.models.kernels.patch_attention import patch_attention
    from engine.models.kernels.tile_product import product as tile_product

    yield from (rows.rms_norm, rows.rms_norm_heads, rows.swiglu, rows.rotate_and_store)
    yield from (experts.choose, experts.gate_chosen, draws.draw, filtered_draws.draw)
    has_pairs = "avx512bf16" in target.features
    if "amx-tile" in target.features:
        yield tile_product
    elif has_pairs:
        yield from (pair_product, chosen_experts.compute)
    attention = patch_attention if has_pairs else decode_attention
    for each in heads:
        yield attention(*each)


def compile_all(targets: Iterable[Target]) -> None:
    """Compile for targets, as many at a time as there are processors, and say what was compiled.

    Raises:
        subprocess.CalledProcessError: kernels cannot be compiled for a target; what it says is on
            standard error.
    """
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        for line in workers.map(_compile_apart, targets):
            print(line, flush=True)


def environment_for(target: Target, directory: Path) -> dict[str, str]:
    """Return the variables with which a process compiles for a target, and keeps that there."""
    return {
        "NUMBA_CPU_NAME": target.processor,
        "NUMBA_CPU_FEATURES": target.options(binding.get_host_cpu_features()),
        "NUMBA_CACHE_DIR": str(directory),
    }


def _compile_apart(target: Target) -> str:
    """Compile in a process of its own: Numba compiles for one target in a process."""
    begun = time.monotonic()
    directory = installed_directory(target.name)
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "engine.models.kernels.installed", "--here", target.name]
    subprocess.run(command, env=os.environ | environment_for(target, directory), check=True)
    for lock in directory.glob("*.lock"):
        lock.unlink()
    count = len(list(directory.rglob("*.nbc")))
    return f"{directory}: {count} kernels in {time.monotonic() - begun:.0f} s"


def _named(name: str) -> Target:
    for target in X86_TARGETS:
        if target.name == name:
            return target
    known = ", ".join(each.name for each in X86_TARGETS)
    raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")


def main() -> None:
    """Compile what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(each.name for each in X86_TARGETS)
    parser.add_argument("target", nargs="*", type=_named, help=f"{names}; default: all of them")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.target or X86_TARGETS
    if not is_x86():
        print("kernels are compiled ahead for x86 alone: engines compile them as they start")
    elif options.here:
        for target in targets:
            for kernel in kernels_for(target, COMMON_HEADS):
                kernel.compile_ahead()
    else:
        compile_all(targets)


if __name__ == "__main__":
    main()
