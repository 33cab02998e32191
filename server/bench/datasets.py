"""What is asked: prompts and output lengths, drawn or read from files."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from server.bench.config import BenchError, WorkloadConfig
from server.bench.server_tokens import ServerTokens

_POOL_WORDS = 2000
_FIT_ROUNDS = 10
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""Conversations outside of these lengths are left out, as is the custom with ShareGPT."""


class Prompt(msgspec.Struct, frozen=True):
    """One thing to ask."""

    content: str | list[int]
    output_tokens: int


def draw_lengths(count: int, length: int, ratio: float, generator: random.Random) -> list[int]:
    """Return `count` lengths drawn evenly from length * (1 - ratio) to length * (1 + ratio)."""
    low = max(1, round(length * (1 - ratio)))
    return [generator.randint(low, max(low, round(length * (1 + ratio)))) for _ in range(count)]


def draw_token_prompts(workload: WorkloadConfig, count: int, pool: Sequence[int]) -> list[Prompt]:
    """Return prompts of token ids from `pool`, of exactly the lengths that the settings say."""
    generator = random.Random(workload.seed)
    prefix = generator.choices(pool, k=workload.random_prefix_len)
    ratio = workload.random_range_ratio
    inputs = draw_lengths(count, workload.random_input_len, ratio, generator)
    outputs = draw_lengths(count, workload.random_output_len, ratio, generator)
    return [
        Prompt(prefix + generator.choices(pool, k=length), output)
        for length, output in zip(inputs, outputs, strict=True)
    ]


def pool_text(seed: int) -> str:
    """Return made-up words, whose tokens are harmless to any model."""
    generator = random.Random(seed)
    words = (
        "".join(generator.choices(_LETTERS, k=generator.randint(1, 8))) for _ in range(_POOL_WORDS)
    )
    return " ".join(words)


async def token_pool(workload: WorkloadConfig, tokens: ServerTokens) -> list[int]:
    """Return the token ids that random prompts are drawn from.

    Raises:
        BenchError: the server has no /tokenize and no vocabulary size was given.
    """
    if workload.random_vocab_size is not None:
        return list(range(workload.random_vocab_size))
    return sorted(set(await tokens.encode(pool_text(workload.seed))))


async def text_of_length(
    token_ids: list[int], pool: Sequence[int], tokens: ServerTokens, generator: random.Random
) -> str:
    """Return a text that has as many tokens as `token_ids`, or nearly: not every length exists."""
    wanted = len(token_ids)
    text = await tokens.decode(token_ids)
    for _ in range(_FIT_ROUNDS):
        found = await tokens.encode(text)
        if len(found) == wanted:
            break
        missing = max(0, wanted - len(found))
        text = await tokens.decode(found[:wanted] + generator.choices(pool, k=missing))
    return text


def read_json_lines_or_text(path: Path, output_tokens: int) -> list[Prompt]:
    """Read a file of prompts: JSON lines with `prompt`, or a prompt per line.

    Raises:
        BenchError: the file cannot be read, or a JSON line is not of that form.
    """
    lines = [line for line in _read(path).splitlines() if line.strip()]
    if path.suffix not in (".jsonl", ".json"):
        return [Prompt(line, output_tokens) for line in lines]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            content = fields["prompt"]
            wanted = int(fields.get("output_tokens", output_tokens))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f'{path}:{number}: expected {{"prompt": ...}}') from error
        is_ids = isinstance(content, list) and all(isinstance(each, int) for each in content)
        if not (isinstance(content, str) or is_ids) or wanted < 1:
            raise BenchError(f"{path}:{number}: prompt must be a text or token ids")
        prompts.append(Prompt(content, wanted))
    return prompts


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """Return the first question and answer of every conversation in a ShareGPT file.

    Raises:
        BenchError: the file is not JSON of that form.
    """
    try:
        entries = json.loads(_read(path))
    except ValueError as error:
        raise BenchError(f"{path}: {error}") from error
    if not isinstance(entries, list):
        raise BenchError(f"{path}: expected a list of conversations")
    pairs = []
    for entry in entries:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if isinstance(turns, list) and len(turns) >= 2:
            question, answer = (_said(turn) for turn in turns[:2])
            if question and answer:
                pairs.append((question, answer))
    return pairs


def _said(turn: Any) -> str:
    value = turn.get("value") if isinstance(turn, dict) else None
    return value if isinstance(value, str) else ""


async def conversation_prompts(
    workload: WorkloadConfig, path: Path, count: int, tokens: ServerTokens
) -> list[Prompt]:
    """Return up to `count` questions, in an order drawn from the seed.

    Raises:
        BenchError: see `read_conversations`, or the server has no /tokenize.
    """
    pairs = read_conversations(path)
    random.Random(workload.seed).shuffle(pairs)
    prompts: list[Prompt] = []
    for question, answer in pairs:
        if len(prompts) == count:
            break
        prompt_tokens = len(await tokens.encode(question))
        output_tokens = workload.sharegpt_output_len or len(await tokens.encode(answer))
        if (
            min(prompt_tokens, output_tokens) >= MIN_TOKENS
            and prompt_tokens <= MAX_PROMPT_TOKENS
            and prompt_tokens + output_tokens <= MAX_TOTAL_TOKENS
        ):
            prompts.append(Prompt(question, output_tokens))
    return prompts


def repeated(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, beginning anew when the dataset has fewer.

    Raises:
        BenchError: there is none.
    """
    if not prompts:
        raise BenchError("the dataset holds no usable prompt")
    return [prompts[index % len(prompts)] for index in range(count)]


async def make_prompts(
    workload: WorkloadConfig, tokens: ServerTokens, *, as_text: bool
) -> list[Prompt]:
    """Return the prompts of a run, those of the warm-up at the end.

    Args:
        as_text: whether prompts must be text: chat takes no token ids.

    Raises:
        BenchError: the dataset cannot be read, or the server does not answer what is needed.
    """
    count = workload.num_prompts + workload.num_warmups
    if workload.dataset_name == "random":
        return await _random_prompts(workload, tokens, count, as_text=as_text)
    if workload.dataset_path is None:
        raise BenchError(f"--dataset-name {workload.dataset_name} needs --dataset-path")
    path = Path(workload.dataset_path)
    if workload.dataset_name == "sharegpt":
        return repeated(await conversation_prompts(workload, path, count, tokens), count)
    prompts = repeated(read_json_lines_or_text(path, workload.custom_output_len), count)
    if as_text and not all(isinstance(prompt.content, str) for prompt in prompts):
        raise BenchError(f"{path}: chat takes no token ids")
    return prompts


async def _random_prompts(
    workload: WorkloadConfig, tokens: ServerTokens, count: int, *, as_text: bool
) -> list[Prompt]:
    pool = await token_pool(workload, tokens)
    prompts = draw_token_prompts(workload, count, pool)
    if not as_text:
        return prompts
    generator = random.Random(workload.seed)
    made = []
    for prompt in prompts:
        assert isinstance(prompt.content, list)
        text = await text_of_length(prompt.content, pool, tokens, generator)
        made.append(Prompt(text, prompt.output_tokens))
    return made


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {error}") from error


def request_body(
    workload: WorkloadConfig, prompt: Prompt, model: str, *, chat: bool, extra: dict[str, Any]
) -> bytes:
    """Return the JSON body of one request."""
    body: dict[str, Any] = {"model": model}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt.content}]
        body["max_completion_tokens"] = prompt.output_tokens
    else:
        body["prompt"] = prompt.content
        body["max_tokens"] = prompt.output_tokens
    if workload.temperature is not None:
        body["temperature"] = workload.temperature
    if workload.ignore_eos:
        body["ignore_eos"] = True
    if workload.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body | extra)
