"""Train the small language model that ships in ``engine/bundled_model``.

The model is a Qwen3-MoE of a few million parameters that writes in the manner of Shakespeare's
plays. It is trained from scratch on one text file, in under half an hour on two processor cores,
and written as a Hugging Face model directory that transformers loads as it is.

Examples:
    # Train with the defaults and write engine/bundled_model
    python scripts/train_bundled_model.py --data tinyshakespeare.txt

    # Stopped half way? The same command goes on from the last checkpoint in .train/
    python scripts/train_bundled_model.py --data tinyshakespeare.txt

    # Try the whole way in a minute, elsewhere
    python scripts/train_bundled_model.py --data tinyshakespeare.txt \\
        --steps 60 --work-dir /tmp/try --output /tmp/try/model

    # Write the directory again from the best weights found so far, without training
    python scripts/train_bundled_model.py --data tinyshakespeare.txt --export-only
"""

import argparse
import ctypes
import sys
from pathlib import Path

import torch
from rich.console import Console

# This file may run by its path, which does not have the folder above it searched for packages.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.shared.writable import writable_directory
from scripts.bundled_training.export import export
from scripts.bundled_training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    description, _, examples = (__doc__ or "").partition("Examples:")
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Examples:" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="PATH", help="the plays as one text file")
    add(
        "--output",
        type=Path,
        default=ROOT / "engine" / "bundled_model",
        metavar="DIR",
        help="where to write the model (engine/bundled_model)",
    )
    add(
        "--work-dir",
        type=Path,
        default=ROOT / ".train",
        metavar="DIR",
        help="where checkpoints are kept (.train)",
    )
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the last checkpoint, if there is one (yes)",
    )
    add("--export-only", action="store_true", help="write the model from the best weights so far")
    add("--minutes", type=float, default=30, help="stop after so much training time (30)")
    add("--steps", type=int, default=700, help="steps of the whole schedule (700)")
    add("--seed", type=int, default=1, help="seed of weights, batches and dropout (1)")
    add("--threads", type=int, default=2, help="processor threads (2); 1 on a busy machine")
    add("--batch-tokens", type=int, default=4096, help="tokens of one step (4096)")
    add("--length", type=int, default=256, help="tokens of one window (256)")
    add(
        "--long-share",
        type=float,
        default=0.15,
        help="share of the steps, at the end, with windows of the full context (0.15)",
    )
    add("--chat-share", type=float, default=0.3, help="share of the windows with chats (0.3)")
    add("--learning-rate", type=float, default=6e-3, help="peak learning rate (0.006)")
    add("--warmup", type=int, default=50, help="steps of rising learning rate (50)")
    add("--weight-decay", type=float, default=0.3, help="weight decay of the matrices (0.3)")
    add("--dropout", type=float, default=0.2, help="dropout of every layer's output (0.2)")
    add("--token-dropout", type=float, default=0.1, help="share of input tokens left out (0.1)")
    add("--balance", type=float, default=0.02, help="weight of the experts' balance loss (0.02)")
    add("--evaluate-every", type=int, default=50, help="steps between held-out losses (50)")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints (50)")
    return parser.parse_args(arguments)


def set_up_process(threads: int) -> None:
    """Make the arithmetic repeatable, and keep freed memory for the next step.

    A step frees and takes hundreds of megabytes; giving them back to the kernel each time would
    cost a tenth of the training time in page faults.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            trim_threshold, mmap_max = -1, -4  # names from malloc.h
            libc.mallopt(mmap_max, 0)
            libc.mallopt(trim_threshold, 2**31 - 1)


def main() -> None:
    """Train, then write the model directory."""
    options = parse_options()
    writable_directory(options.output)
    writable_directory(options.work_dir)
    set_up_process(options.threads)
    trainer = Trainer(options, Console(width=None if sys.stdout.isatty() else 200))
    if options.export_only:
        trainer.resume()
    else:
        if options.resume and trainer.resume():
            trainer.console.print(f"going on from step {trainer.step} in {trainer.work}")
        trainer.run()
    export(trainer)


if __name__ == "__main__":
    main()
