"""Grammars over the bundled model's tokenizer."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.masks import GrammarTable, grammar_table
from engine.shared.config import BUNDLED_MODEL

VOCAB_SIZE = 2048
EOS = (2, 0)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(BUNDLED_MODEL / "tokenizer.json", VOCAB_SIZE, EOS)
    yield made
    made.shutdown()


@pytest.fixture
def table() -> Iterator[GrammarTable]:
    made = grammar_table(Path(BUNDLED_MODEL), VOCAB_SIZE, EOS)
    assert made is not None
    yield made
    made.shutdown()


@pytest.fixture
def settled(compiler: GrammarCompiler) -> threading.Semaphore:
    """Semaphore released whenever the compiler reports a settled grammar, after its waiters."""
    times = threading.Semaphore(0)
    compiler.on_settled = times.release
    return times
