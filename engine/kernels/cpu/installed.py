"""Compiles kernels into an installation.

python -m engine.kernels.cpu.installed
python -m engine.kernels.cpu.installed avx512-bf16    # only for Zen 4 and 5

For images: kernels compiled in a container are lost with it. Kernels are compiled for every
target, or the named ones, whatever processor this is, and stored beside the installed packages,
from where engines copy those for their target.
"""

# Imports no other module of the engine, so that an image layer with kernels stays valid when those
# change.
import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from engine.kernels.cpu.compiling import Kernel
from engine.kernels.cpu.kernel_cache import installed_directory
from engine.kernels.cpu.targets import X86_TARGETS, Target
from engine.kernels.processor import is_x86

_MODULE = "engine.kernels.cpu.installed"


class Heads(NamedTuple):
    """Attention shape that a kernel is compiled for."""

    group: int
    """Query heads per KV head."""
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
"""Shapes of models commonly served on CPUs. Other attention kernels are compiled at load."""


def kernels_for(target: Target, heads: Iterable[Heads]) -> Iterator[Kernel]:
    """Yield the kernels of whole bfloat16 models on a target's processors."""
    from engine.kernels.cpu import chosen_experts, draws, experts, filtered_draws, rows
    from engine.kernels.cpu.pair_product import product as pair_product
    from engine.kernels.cpu.patch_attention import patch_attention
    from engine.kernels.cpu.tile_product import product as tile_product

    yield from (rows.rms_norm, rows.rms_norm_heads, rows.swiglu, rows.rotate_and_store)
    yield from (experts.choose, experts.gate_chosen, draws.draw, filtered_draws.draw)
    if "amx-tile" in target.features:
        yield tile_product
    else:
        yield from (pair_product, chosen_experts.compute)
    for each in heads:
        yield patch_attention(*each)


def environment_for(target: Target, directory: Path) -> dict[str, str]:
    """Return the environment of a process that compiles for a target into `directory`."""
    return {
        "NUMBA_CPU_NAME": target.processor,
        "NUMBA_CPU_FEATURES": target.options,
        "NUMBA_CACHE_DIR": str(directory),
    }


def compile_all(targets: Iterable[Target]) -> None:
    """Compile each target in a separate process, since Numba's target is per process.

    Raises:
        subprocess.CalledProcessError: a kernel cannot be compiled; details are on standard error.
    """
    for target in targets:
        directory = installed_directory(target.name)
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", _MODULE, "--here", target.name]
        subprocess.run(command, env=os.environ | environment_for(target, directory), check=True)
        for lock in directory.glob("*.lock"):
            lock.unlink()
        print(f"{directory}: {len(list(directory.rglob('*.nbc')))} kernels", flush=True)


def main() -> None:
    """Compile the kernels given on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {target.name: target for target in X86_TARGETS}
    parser.add_argument("target", nargs="*", metavar="|".join(known), help="default: all of them")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.target) - known.keys()
    if unknown:
        parser.error(f"{unknown.pop()!r} is not one of {', '.join(known)}")
    targets = [known[name] for name in options.target or known]
    if not is_x86():
        print("kernels are only compiled ahead for x86: engines compile them at startup")
    elif options.here:
        for target in targets:
            for kernel in kernels_for(target, COMMON_HEADS):
                kernel.compile_ahead()
    else:
        compile_all(targets)


if __name__ == "__main__":
    main()
