"""Samples randomly from masks, like a model that generates nonsense."""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from engine.batch.batch import SlotStart
from engine.grammar.masks import GrammarTable, grammar_table
from engine.shared.config import BUNDLED_MODEL
from engine.shared.messages import GrammarSpec, SamplingParams

TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
EOS = {0, 2}
_MOST = 2000
_ENDS = 0.2
"""Probability that an output ends when it can."""
_PAUSE = 0.02
"""Seconds until a sequence whose mask was late samples again."""


@contextlib.contextmanager
def bundled_table() -> Iterator[GrammarTable]:
    """Provide a table over the bundled model's tokenizer for a block."""
    made = grammar_table(Path(BUNDLED_MODEL), TOKENIZER.get_vocab_size(), sorted(EOS))
    assert made is not None
    yield made
    made.shutdown()


def write(table: GrammarTable, spec: GrammarSpec, rng: random.Random) -> str:
    """Return an output that a grammar accepted as complete.

    Raises:
        AssertionError: it ended with an error, or did not end.
    """
    sampling = SamplingParams(max_tokens=1, seed=0, grammar=spec)
    drawn: list[int] = []
    table.start(SlotStart(0, [5], 1, sampling))
    for _ in range(_MOST):
        choices = table.choices([0])[0][0]
        ends = [token_id for token_id in choices if token_id in EOS]
        token_id = rng.choice(ends if ends and rng.random() < _ENDS else choices)
        ended = table.advance([0], [token_id])
        if 0 in ended.stalls:  # on a busy machine: the token does not count
            time.sleep(_PAUSE)
            table.start(SlotStart(0, [5, *drawn], 1, sampling))
            continue
        drawn.append(token_id)
        if ended.reasons:
            assert ended.reasons == {0: None}, ended
            return str(TOKENIZER.decode([t for t in drawn if t not in EOS]))
    raise AssertionError("the output did not end")
