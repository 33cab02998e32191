"""What each form of a model makes of a text."""

import math
import platform
import pydoc_data.topics
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from benchmarks.forms.stored import Form
from engine.executor.loading import load_model
from engine.runner.model_runner import ModelRunner
from engine.scheduler.batch import BatchPlan, SlotBlocks, SlotStart
from engine.shared.config import CacheConfig, EngineConfig, ModelConfig
from engine.shared.messages import SamplingParams

_WINDOW = 512
_TOPICS = ("execmodel", "import", "naming", "strings", "typesmapping")
TEXT = f"Python {platform.python_version()}'s reference, {', '.join(_TOPICS)}"


class Perplexity(NamedTuple):
    """Of the text, whose first token in each window is given."""

    value: float
    num_tokens: int


def perplexity(form: Form, tokenizer: Tokenizer, windows: int) -> Perplexity:
    """Return how well a form foretells so many windows of 512 tokens of the text."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in _TOPICS)
    tokens = tokenizer.encode(text).ids[: windows * _WINDOW]
    runner = _load(form)
    summed, count = 0.0, 0
    for number, start in enumerate(range(0, len(tokens), _WINDOW)):
        window = tokens[start : start + _WINDOW]
        blocks = list(range(_WINDOW // 16))
        plan = BatchPlan(
            step=number,
            starting=[SlotStart(0, window, len(window), _GREEDY)],
            blocks=[SlotBlocks(0, 0, blocks)],
            slots=[0],
            starts=[0],
            counts=[len(window)],
            samples=[False],
        )
        with torch.inference_mode():
            logits = runner.model.logits(runner.hidden_states(plan)[:-1])
            logprobs = torch.log_softmax(logits.float(), dim=-1)
        summed -= float(logprobs.gather(1, torch.tensor(window[1:]).unsqueeze(1)).sum())
        count += len(window) - 1
    return Perplexity(math.exp(summed / count), count)


_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def _load(form: Form) -> ModelRunner:
    model = ModelConfig(
        model=str(form.path), dtype="bfloat16", quantization=form.quantization, max_model_len=1024
    )
    config = EngineConfig(model=model, cache=CacheConfig(kv_cache_dtype=form.kv_cache_dtype))
    loaded = load_model(config, torch.device("cpu"), lambda _: None)
    return ModelRunner(
        loaded.model, max_num_seqs=1, max_model_len=1024, num_kv_blocks=64, block_size=16
    )
