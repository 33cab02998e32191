"""What token masks cost a step: computing them, applying them, and following the drawn tokens.

    python -m benchmarks.grammar_bench [TOKENIZER.json]

Every sequence writes random JSON under one schema with a grammar position of its own.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.masks import GrammarTable, TokenMasks
from engine.runner.penalties import forbid_others
from engine.scheduler.batch import SlotStart
from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import GrammarSpec, JsonObjectGrammar, JsonSchemaGrammar, SamplingParams

SCHEMA = """{"type": "object", "additionalProperties": false,
 "properties": {
  "name": {"type": "string", "maxLength": 40},
  "age": {"type": "integer", "minimum": 0, "maximum": 130},
  "email": {"type": "string", "format": "email"},
  "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 8},
  "address": {"type": "object", "additionalProperties": false,
   "properties": {"street": {"type": "string"}, "city": {"enum": ["Verona", "Mantua"]}},
   "required": ["street", "city"]}},
 "required": ["name", "age", "email", "tags", "address"]}"""
SPECS: dict[str, GrammarSpec] = {
    "JSON schema": JsonSchemaGrammar(SCHEMA),
    "any JSON object": JsonObjectGrammar(),
}
STEPS = 150


def timed(function: Callable[[], object]) -> tuple[object, float]:
    """Return what a call returned and how long it took in microseconds."""
    begin = time.perf_counter()
    result = function()
    return result, (time.perf_counter() - begin) * 1e6


def start(table: GrammarTable, slot: int, spec: GrammarSpec) -> None:
    """Let a new sequence take the slot."""
    sampling = SamplingParams(max_tokens=1, seed=0, grammar=spec)
    table.start(SlotStart(slot, [1], 1, sampling))


def measure(
    compiler: GrammarCompiler, vocab_size: int, spec: GrammarSpec, batch: int
) -> list[float]:
    """Return the median microseconds of a step: masks, applying them, following the tokens."""
    table = GrammarTable(compiler, vocab_size=vocab_size, eos_token_ids=(0,))
    rng = random.Random(0)
    logits = torch.randn(batch, vocab_size)
    slots = list(range(batch))
    for slot in slots:
        start(table, slot, spec)
    samples: list[list[float]] = []
    for _ in range(STEPS):
        masks, fill = timed(lambda: table.masks(slots))
        assert isinstance(masks, TokenMasks)
        row_logits = logits.clone()
        _, apply = timed(lambda at=row_logits, of=masks: forbid_others(at, of))  # type: ignore[misc]
        allowed = masks.allowed(vocab_size)
        drawn = [rng.choice(np.flatnonzero(row).tolist()) for row in allowed]
        ends, follow = timed(lambda of=drawn: table.advance(slots, of).reasons)  # type: ignore[misc]
        for slot in ends:  # type: ignore[attr-defined]
            start(table, slot, spec)
        samples.append([fill, apply, follow])
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def main() -> None:
    """Print one line per grammar and batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path, nargs="?", default=BUNDLED_MODEL / "tokenizer.json")
    options = parser.parse_args()
    vocab_size = Tokenizer.from_file(str(options.tokenizer)).get_vocab_size()
    compiler = GrammarCompiler(options.tokenizer, vocab_size, (0,))
    _, load = timed(compiler.tokenizer)
    table = Table(title=f"vocabulary of {vocab_size:,}, microseconds a step")
    for name in ("grammar", "rows", "masks", "apply", "follow"):
        table.add_column(name, justify="left" if name == "grammar" else "right")
    console = Console()
    console.print(f"tokenizer: {load / 1e3:.0f} ms")
    for name, spec in SPECS.items():
        grammar, took = timed(lambda of=spec: compiler.ask(of))  # type: ignore[misc]
        begin = time.perf_counter()
        grammar.wait()  # type: ignore[attr-defined]
        console.print(
            f"{name}: compiled in {took / 1e3 + (time.perf_counter() - begin) * 1e3:.1f} ms"
        )
        for batch in (1, 16, 64):
            costs = measure(compiler, vocab_size, spec, batch)
            table.add_row(name, str(batch), *(f"{cost:,.0f}" for cost in costs))
    console.print(table)
    compiler.shutdown()


if __name__ == "__main__":
    main()
