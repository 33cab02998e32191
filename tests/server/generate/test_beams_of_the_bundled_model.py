"""Beam search over HTTP, with the bundled model in float32, against that of transformers."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.shared.config import (
    BUNDLED_MODEL,
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.shared.messages import AddRequest
from server.config import FrontEndConfig
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import FakeGenerationClient, FakeStream, Http, app_of

MODEL = ModelConfig(model=str(BUNDLED_MODEL), dtype="float32", max_model_len=128, device="cpu")
PROMPTS = ("ROMEO:\nI am", "KING RICHARD III:\nNow is the winter")
MAX_TOKENS = 12
RULES = [(1.0, False), (0.0, True), (-1.0, "never"), (2.0, "never"), (2.0, True)]
"""Length penalties, each with a value of early stopping."""


class OneEngine(FakeGenerationClient):
    """Runs sequences on a real engine that steps between event loop iterations."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        super().__init__(tokenizer)
        config = EngineConfig(
            model=MODEL,
            cache=CacheConfig(num_kv_blocks=200, block_size=8),
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
            executor=ExecutorConfig(threads=1),
        )
        self.executor = InProcessExecutor(config)
        self._core = EngineCore(config, self.executor, rank=0, incarnation=1)
        self._core.front_end_joined(0, 1)
        self._running: dict[int, FakeStream] = {}
        self.context = 128
        self.largest_batch = 0
        self.script = self._hand_over

    def _hand_over(self, stream: FakeStream) -> tuple[()]:
        if not self._running:
            asyncio.get_running_loop().call_soon(self._step)
        self._running[stream.id] = stream
        self.largest_batch = max(self.largest_batch, len(self._running))
        self._core.handle(
            AddRequest(stream.id, stream.request_id, 0, 0, stream.prompt_token_ids, stream.sampling)
        )
        return ()

    def _step(self) -> None:
        for output in self._core.step().outputs.get(0, []):
            stream = self._running[output.id]
            if output.finish_reason is not None:
                del self._running[output.id]
            stream.feed(output)
        if self._running:
            asyncio.get_running_loop().call_soon(self._step)


@pytest.fixture(scope="module")
def engine() -> Iterator[OneEngine]:
    made = OneEngine(ServedTokenizer.load(BUNDLED_MODEL, MODEL))
    yield made
    made.executor.shutdown()


@pytest.fixture(scope="module")
def reference() -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED_MODEL, dtype=torch.float32
    )
    return model.eval()


def of_transformers(
    model: Any, prompt: list[int], ends: list[int], width: int, rule: tuple[float, Any]
) -> list[list[int]]:
    """Return the tokens of all beams, best first, including end tokens."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=rule[0],
        early_stopping=rule[1],
        eos_token_id=ends,
        do_sample=False,
        temperature=None,
        top_p=None,
    )
    beams = []
    for row in found[:, len(prompt) :].tolist():
        stop = next((place for place, token_id in enumerate(row) if token_id in ends), MAX_TOKENS)
        beams.append(row[: stop + 1])
    return beams


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_beam_search_answers_equal_transformers(
    engine: OneEngine, reference: Any, prompt: str, width: int
) -> None:
    config = FrontEndConfig(model=MODEL)
    http = Http(app_of(config, engine, engine.tokenizer))
    tokenizer = engine.tokenizer
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
    (line_end,) = tokenizer.encode("\n", add_special_tokens=False)
    num_ended = 0
    for rule in RULES:
        ends = [*tokenizer.eos_token_ids, line_end]
        expected = of_transformers(reference, prompt_ids, ends, width, rule)
        body = {
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "use_beam_search": True,
            "n": width,
            "length_penalty": rule[0],
            "early_stopping": rule[1],
            "stop_token_ids": [line_end],
            "return_token_ids": True,
        }
        choices = http.post("/v1/completions", body).json()["choices"]
        assert [each["token_ids"] for each in choices] == expected
        num_ended += sum(each["finish_reason"] == "stop" for each in choices)
    assert num_ended
    assert engine.largest_batch >= width
