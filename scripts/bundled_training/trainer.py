"""One training run: its steps, its measurements and its checkpoints."""

import argparse
import hashlib
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import nn

from .batches import Batches
from .evaluation import evaluate
from .model import LanguageModel
from .optimizer import learning_rate, make_optimizers
from .shape import Shape
from .text import split_text, train_tokenizer


def save_atomically(content: Any, path: Path) -> None:
    """Write with torch.save so that a crash leaves the old file or the new one, never a half."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class Trainer:
    """The state of one training run, and its checkpoints in the work directory.

    ``last.pt`` holds everything needed to go on, ``best.pt`` the weights with the lowest held-out
    loss so far.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.work: Path = options.work_dir
        self.work.mkdir(parents=True, exist_ok=True)
        text = options.data.read_text(encoding="utf-8")
        self.train_text, self.held_out_text = split_text(text)
        self.shape = Shape()
        self.tokenizer = self._tokenizer()
        self.batches = Batches(self.train_text, self.tokenizer, options.seed, options.chat_share)
        torch.manual_seed(options.seed)
        self.model = LanguageModel(self.shape, options.dropout, options.token_dropout)
        self.model.initialise()
        self.optimizers = make_optimizers(self.model, options.weight_decay)
        self.step = 0
        self.seconds = 0.0
        self.best = math.inf
        # A checkpoint goes on only with what shapes its batches and its schedule unchanged.
        self.recipe = {
            key: getattr(options, key)
            for key in (
                "seed",
                "steps",
                "batch_tokens",
                "length",
                "long_share",
                "chat_share",
                "dropout",
                "token_dropout",
                "weight_decay",
                "learning_rate",
                "warmup",
                "balance",
            )
        } | {"data": hashlib.sha256(text.encode()).hexdigest()}

    def _tokenizer(self) -> Tokenizer:
        path = self.work / "tokenizer.json"
        if not path.exists():
            partial = path.with_suffix(".partial")
            train_tokenizer(self.train_text, self.shape.vocab_size).save(str(partial))
            os.replace(partial, path)
        return Tokenizer.from_file(str(path))

    def resume(self) -> bool:
        """Take up the last checkpoint of the same recipe; return whether there was one."""
        path = self.work / "last.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        if state["recipe"] != self.recipe:
            raise SystemExit(
                f"{path} was made with other options or data: "
                f"pass the same ones, another --work-dir, or --no-resume to start over"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, content in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        torch.set_rng_state(state["random"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        return True

    def checkpoint(self) -> None:
        """Write ``last.pt``."""
        state = {
            "recipe": self.recipe,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
        }
        save_atomically(state, self.work / "last.pt")

    def length_of(self, step: int) -> int:
        """Return the window length of a step: the last part of the run learns long contexts."""
        if step >= self.options.steps * (1 - self.options.long_share):
            return self.shape.max_position_embeddings
        return int(self.options.length)

    def train_step(self) -> float:
        """Learn from one batch and return its loss in nats per token."""
        options = self.options
        length = self.length_of(self.step)
        tokens = self.batches.batch(self.step, max(1, options.batch_tokens // length), length)
        rate = learning_rate(
            self.step, steps=options.steps, peak=options.learning_rate, warmup=options.warmup
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, balance, _ = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss + options.balance * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach())

    def evaluate(self, train_loss: float) -> None:
        """Measure the held-out loss and keep the weights if they are the best so far."""
        result = evaluate(self.model, self.tokenizer, self.held_out_text)
        better = result.nats_per_token < self.best
        if better:
            self.best = result.nats_per_token
            save_atomically(
                {"model": self.model.state_dict(), "step": self.step, "recipe": self.recipe},
                self.work / "best.pt",
            )
        uses = [share for layer in result.shares for share in layer]
        self.console.print(
            f"step {self.step:5d}  {self.seconds / 60:5.1f} min  train {train_loss:.3f}  "
            f"held out {result.nats_per_token:.4f} nats/token, {result.bits_per_byte:.4f} "
            f"bits/byte{' *' if better else ''}  experts {min(uses):.3f}..{max(uses):.3f}",
            highlight=False,
        )

    def run(self) -> None:
        """Train until the steps are done or the minutes are spent."""
        options = self.options
        self.model.train()
        columns = (
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        smooth = math.nan
        with Progress(
            *columns, console=self.console, disable=not self.console.is_terminal
        ) as progress:
            task = progress.add_task(
                "", total=options.steps, completed=self.step, loss=math.nan, speed=0.0
            )
            while self.step < options.steps and self.seconds < options.minutes * 60:
                began = time.perf_counter()
                loss = self.train_step()
                smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
                took = time.perf_counter() - began
                speed = options.batch_tokens / took
                if self.step % options.evaluate_every == 0 or self.step == options.steps:
                    self.evaluate(smooth)
                self.seconds += time.perf_counter() - began
                if self.step % options.checkpoint_every == 0:
                    self.checkpoint()
                progress.update(task, completed=self.step, loss=smooth, speed=speed)
        if self.step < options.steps:
            self.evaluate(smooth)
            self.console.print(f"stopped after {options.minutes:g} minutes, as asked")
        self.checkpoint()
