"""What each form of a model makes of a text, and whether greedy answers are transformers'."""

import itertools
import math
import platform
import pydoc_data.topics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.forms.stored import Form
from engine.core.engine_core import EngineCore
from engine.executor.in_process import InProcessExecutor
from engine.executor.loading import load_model
from engine.runner.model_runner import ModelRunner
from engine.scheduler.batch import BatchPlan, SlotBlocks, SlotStart
from engine.shared.config import CacheConfig, EngineConfig, ModelConfig
from engine.shared.messages import AddRequest, SamplingParams

_WINDOW = 512
_TOPICS = ("execmodel", "import", "naming", "strings", "typesmapping")
TEXT = f"Python {platform.python_version()}'s reference, {', '.join(_TOPICS)}"

_FORMS = (
    "What is {}?",
    "Explain {} to a child in two sentences.",
    "Write a short poem about {}.",
    "Why do people care about {}?",
    "Name three facts about {}.",
)
_THINGS = (
    "the moon", "a volcano", "Paris", "chess", "honey", "photosynthesis", "a prime number",
    "the Roman Empire", "electricity", "good sleep",
)  # fmt: skip


class Perplexity(NamedTuple):
    """Of the text, whose first token in each window is given."""

    value: float
    num_tokens: int


def perplexity(form: Form, tokenizer: Tokenizer, windows: int) -> Perplexity:
    """Return how well a form predicts so many windows of 512 tokens of the text."""
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


def greedy_equal(model: Path, tokenizer: Tokenizer, prompts: int, tokens: int) -> tuple[int, int]:
    """Answer prompts greedily in fp32, all at once.

    Returns:
        How many prompts there were, and how many answers have at every position the token that
        transformers, which reads the GGUF file by itself, finds likeliest there.
    """
    asked = [
        tokenizer.encode(
            f"<|im_start|>user\n{form.format(thing)}<|im_end|>\n<|im_start|>assistant\n"
        ).ids
        for form, thing in itertools.islice(itertools.product(_FORMS, _THINGS), prompts)
    ]
    answers = _answers(model, asked, tokens)
    loader: Any = AutoModelForCausalLM
    reference = loader.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()
    same = 0
    for prompt, answer in zip(asked, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0]
        same += logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == answer
    return len(asked), same


def _answers(model: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", max_model_len=512),
        cache=CacheConfig(kv_cache_memory_bytes=512 << 20),
    )
    core = EngineCore(config, InProcessExecutor(config), rank=0, incarnation=1)
    core.front_end_joined(0, 1)
    sampling = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.handle(AddRequest(number, str(number), 0, 0, prompt, sampling))
    answers: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for output in core.step().outputs.get(0, []):
            answers[output.id] += output.token_ids
    return answers
