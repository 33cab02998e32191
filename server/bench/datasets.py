"""Prompts and output lengths, sampled or read from files, with tokens counted by the server."""

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from server.bench.config import BenchError, WorkloadConfig
from server.bench.connection import BadAnswer, HttpClient

T = TypeVar("T")

_TIMEOUT_SECONDS = 60
_AT_ONCE = 16
_POOL_WORDS = 2000
_FIT_ROUNDS = 10
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""Conversations outside these lengths are skipped, as is customary with ShareGPT."""


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


class ServerTokens:
    """Tokenizes with the server's tokenizer, so that none needs to be installed here.

    Methods raise BenchError if the server does not respond as expected.
    """

    def __init__(self, client: HttpClient, model: str | None) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._model = model

    async def find_model(self) -> str:
        """Return the model to use: the configured one, or the first that the server lists."""
        if self._model is None:
            models = await self._call("GET", "/v1/models", None, _Models)
            if not models.data:
                raise self._failed("the server lists no model: name one with --model")
            self._model = str(models.data[0].get("id"))
        return self._model

    async def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text, without special tokens."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return (await self._call("POST", "/tokenize", body, _Tokens)).tokens

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of token IDs."""
        body = {"model": self._model, "tokens": token_ids}
        return (await self._call("POST", "/detokenize", body, _Text)).prompt

    async def _call(self, method: str, path: str, body: Any, kind: type[T]) -> T:
        payload = b"" if body is None else msgspec.json.encode(body)
        try:
            async with self._slots, asyncio.timeout(_TIMEOUT_SECONDS):
                answer = await self._client.request(method, path, payload)
        except (OSError, BadAnswer) as error:
            raise self._failed(f"{method} {path}: {error or type(error).__name__}") from error
        if answer.status != 200:
            reason = answer.body[:200].decode("utf-8", "replace")
            raise self._failed(f"{method} {path} answered {answer.status}: {reason}")
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.DecodeError as error:
            raise self._failed(f"{method} {path}: {error}") from error

    def _failed(self, why: str) -> BenchError:
        return BenchError(f"{self._client.url}: {why}")


class Prompt(msgspec.Struct, frozen=True):
    """A prompt with its output length."""

    content: str | list[int]
    output_tokens: int


def draw_token_prompts(workload: WorkloadConfig, count: int, pool: Sequence[int]) -> list[Prompt]:
    """Return prompts of token IDs from `pool`, of exactly the configured lengths."""
    generator = random.Random(workload.seed)
    prefix = generator.choices(pool, k=workload.random_prefix_len)
    ratio = workload.random_range_ratio

    def lengths(mean: int) -> list[int]:
        """Sample uniformly from mean * (1 - ratio) to mean * (1 + ratio)."""
        low = max(1, round(mean * (1 - ratio)))
        return [generator.randint(low, max(low, round(mean * (1 + ratio)))) for _ in range(count)]

    inputs, outputs = lengths(workload.random_input_len), lengths(workload.random_output_len)
    return [
        Prompt(prefix + generator.choices(pool, k=length), output)
        for length, output in zip(inputs, outputs, strict=True)
    ]


async def _random_prompts(
    workload: WorkloadConfig, tokens: ServerTokens, count: int, *, as_text: bool
) -> list[Prompt]:
    """Return prompts of random token IDs, or of texts with about as many tokens."""
    generator = random.Random(workload.seed)
    if workload.random_vocab_size is not None:
        pool = list(range(workload.random_vocab_size))
    else:
        # Made-up words, whose tokens have no special meaning to any model.
        words = [
            "".join(generator.choices(_LETTERS, k=generator.randint(1, 8)))
            for _ in range(_POOL_WORDS)
        ]
        pool = sorted(set(await tokens.encode(" ".join(words))))
    drawn = draw_token_prompts(workload, count, pool)
    if not as_text:
        return drawn
    generator = random.Random(workload.seed)
    prompts = []
    for prompt in drawn:
        assert isinstance(prompt.content, list)
        target_length = len(prompt.content)
        text = await tokens.decode(prompt.content)
        for _ in range(_FIT_ROUNDS):  # not every length is possible
            found = await tokens.encode(text)
            if len(found) == target_length:
                break
            missing = max(0, target_length - len(found))
            text = await tokens.decode(found[:target_length] + generator.choices(pool, k=missing))
        prompts.append(Prompt(text, prompt.output_tokens))
    return prompts


def read_json_lines_or_text(path: Path, output_tokens: int) -> list[Prompt]:
    """Read a file of prompts: JSON lines with `prompt`, or one prompt per line.

    Raises:
        BenchError: the file cannot be read, or a JSON line is malformed.
    """
    lines = [line for line in _read(path).splitlines() if line.strip()]
    if path.suffix not in (".jsonl", ".json"):
        return [Prompt(line, output_tokens) for line in lines]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            content = fields["prompt"]
            num_output_tokens = int(fields.get("output_tokens", output_tokens))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f'{path}:{number}: expected {{"prompt": ...}}') from error
        is_ids = isinstance(content, list) and all(isinstance(each, int) for each in content)
        if not (isinstance(content, str) or is_ids) or num_output_tokens < 1:
            raise BenchError(f"{path}:{number}: prompt must be a text or token ids")
        prompts.append(Prompt(content, num_output_tokens))
    return prompts


async def conversation_prompts(
    workload: WorkloadConfig, path: Path, count: int, tokens: ServerTokens
) -> list[Prompt]:
    """Return up to `count` first questions of a ShareGPT file, shuffled by the seed.

    Raises:
        BenchError: the file is malformed, or the server has no /tokenize.
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
        if not isinstance(turns, list):
            continue
        values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        texts = [text for text in values if isinstance(text, str) and text]
        if len(texts) == 2:
            pairs.append((texts[0], texts[1]))
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {error}") from error


async def make_prompts(
    workload: WorkloadConfig, tokens: ServerTokens, *, as_text: bool
) -> list[Prompt]:
    """Return the prompts of a run, followed by those of the warm-up; a short dataset is repeated.

    Args:
        as_text: whether prompts must be text, because chat accepts no token IDs.

    Raises:
        BenchError: the dataset is unreadable or empty, or a request to the server failed.
    """
    count = workload.num_prompts + workload.num_warmups
    if workload.dataset_name == "random":
        return await _random_prompts(workload, tokens, count, as_text=as_text)
    if workload.dataset_path is None:
        raise BenchError(f"--dataset-name {workload.dataset_name} needs --dataset-path")
    path = Path(workload.dataset_path)
    if workload.dataset_name == "sharegpt":
        prompts = await conversation_prompts(workload, path, count, tokens)
    else:
        prompts = read_json_lines_or_text(path, workload.custom_output_len)
    if not prompts:
        raise BenchError("the dataset holds no usable prompt")
    prompts = [prompts[index % len(prompts)] for index in range(count)]
    if as_text and not all(isinstance(prompt.content, str) for prompt in prompts):
        raise BenchError(f"{path}: chat takes no token ids")
    return prompts


def request_bodies(
    workload: WorkloadConfig, prompts: Sequence[Prompt], model: str, *, chat: bool
) -> list[bytes]:
    """Return the JSON bodies of requests."""
    common: dict[str, Any] = {"model": model}
    if workload.temperature is not None:
        common["temperature"] = workload.temperature
    if workload.ignore_eos:
        common["ignore_eos"] = True
    if workload.stream:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    extra, bodies = workload.extra_fields(), []
    for prompt in prompts:
        body: dict[str, Any] = {"prompt": prompt.content, "max_tokens": prompt.output_tokens}
        if chat:
            messages = [{"role": "user", "content": prompt.content}]
            body = {"messages": messages, "max_completion_tokens": prompt.output_tokens}
        bodies.append(msgspec.json.encode(common | body | extra))
    return bodies
