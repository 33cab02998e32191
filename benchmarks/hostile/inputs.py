"""Requests for vectors and scores that are as costly as the server accepts."""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.hostile.large import SIZE
from benchmarks.hostile.requests import Request
from server.limits import MAX_INPUT_TOKENS, MAX_JSON_VALUES, MAX_PROMPTS

VALID_INPUTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["What news?"]},
    "/pooling": {"input": [[1, 2, 3]]},
    "/score": {"text_1": "What news?", "text_2": ["None", "Good"]},
    "/rerank": {"query": "What news?", "documents": ["None", {"text": "Good"}]},
}
"""A minimal valid request for each path."""


def costly_inputs() -> Iterator[Request]:
    """Yield requests with inputs at or above the limits of number and length."""
    share = SIZE // MAX_PROMPTS - 16
    tokens = MAX_INPUT_TOKENS // MAX_PROMPTS
    bodies: dict[str, dict[str, Any]] = {
        "2,048 words": {"input": ["a"] * MAX_PROMPTS},
        "2,048 words in base64": {"input": ["a"] * MAX_PROMPTS, "encoding_format": "base64"},
        "2,049 words": {"input": ["a"] * (MAX_PROMPTS + 1)},
        "2,048 texts": {"input": ["ab " * (share // 3)] * MAX_PROMPTS},
        "2,048 texts cut": {
            "input": ["ab " * (share // 3)] * MAX_PROMPTS,
            "truncate_prompt_tokens": 1,
        },
        "2,048 lists of token ids": {"input": [[5] * (tokens // 4)] * MAX_PROMPTS},
        "one text": {"input": "qxzj " * (SIZE // 5 - 20)},
        "one text cut": {"input": "qxzj " * (SIZE // 5 - 20), "truncate_prompt_tokens": -1},
        "one text cut at its end": {
            "input": "a" * (SIZE - 100), "truncate_prompt_tokens": -1, "truncation_side": "left",
        },
        "token ids": {"input": [300] * (MAX_JSON_VALUES - 10)},
        "wrong token ids": {"input": [-1] * (MAX_JSON_VALUES - 10)},
        "empty lists": {"input": [[]] * 30_000},
        "texts and numbers": {"input": ["a"] * 2000 + [1]},
        "dimensions": {"input": ["a"] * MAX_PROMPTS, "dimensions": 10**30},
    }  # fmt: skip
    for name, body in bodies.items():
        yield Request(f"/v1/embeddings {name}", "/v1/embeddings", json.dumps(body).encode())
    many = ["ab"] * (MAX_PROMPTS - 1)
    at_most: dict[str, dict[str, Any]] = {
        "/score": {"text_1": "ab", "text_2": many},
        "/v1/score": {"text_1": ["ab"] * 1024, "text_2": ["ba " * 600] * 1024},
        "/rerank": {"query": "ab", "documents": many},
        "/v2/rerank": {"query": "a " * 10**6, "documents": [{"text": "b"}] * 2047},
        "/pooling": {"input": [[1]] * MAX_PROMPTS, "task": "token_embed"},
    }
    for path, body in at_most.items():
        yield Request(f"{path} at its most", path, json.dumps(body).encode())
