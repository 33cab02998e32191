import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from server.bench.config import BenchError, WorkloadConfig
from server.bench.datasets import (
    Prompt,
    conversation_prompts,
    draw_token_prompts,
    make_prompts,
    read_json_lines_or_text,
    request_bodies,
)


class WordTokens:
    """A tokenizer with one token per word."""

    model = "words"

    def __init__(self) -> None:
        self.words: list[str] = []

    async def encode(self, text: str) -> list[int]:
        found = text.split()
        self.words += [word for word in dict.fromkeys(found) if word not in self.words]
        return [self.words.index(word) for word in found]

    async def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[token_id] for token_id in token_ids)


def test_random_prompts_have_exact_lengths_and_a_common_prefix() -> None:
    workload = WorkloadConfig(random_input_len=40, random_output_len=7, random_prefix_len=5)
    prompts = draw_token_prompts(workload, 30, range(100, 200))
    assert {len(prompt.content) for prompt in prompts} == {45}
    assert {prompt.output_tokens for prompt in prompts} == {7}
    assert len({tuple(prompt.content[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt.content) for prompt in prompts}) == 30
    assert draw_token_prompts(workload, 30, range(100, 200)) == prompts


def test_random_lengths_stay_within_their_range() -> None:
    workload = WorkloadConfig(random_input_len=100, random_output_len=10, random_range_ratio=0.3)
    prompts = draw_token_prompts(workload, 500, [1, 2, 3])
    lengths = {len(prompt.content) for prompt in prompts}
    assert (min(lengths), max(lengths)) == (70, 130)
    assert {prompt.output_tokens for prompt in prompts} == set(range(7, 14))


def test_random_text_has_requested_length() -> None:
    tokens: Any = WordTokens()
    workload = WorkloadConfig(num_prompts=5, num_warmups=2, random_input_len=20)
    prompts = asyncio.run(make_prompts(workload, tokens, as_text=True))
    assert len(prompts) == 7
    assert all(len(str(prompt.content).split()) == 20 for prompt in prompts)


def test_conversations_provide_questions_and_answer_lengths(tmp_path: Path) -> None:
    def talk(*said: str) -> dict[str, Any]:
        names = ("human", "gpt")
        turns = [{"from": names[i % 2], "value": value} for i, value in enumerate(said)]
        return {"conversations": turns}

    path = tmp_path / "share.json"
    short, long = "one two three four five", "w " * 1200
    path.write_text(
        json.dumps(
            [talk(short, "a b c d e f"), talk(short), talk(long, short), talk("hi", short), {}]
        )
    )
    tokens: Any = WordTokens()
    assert asyncio.run(conversation_prompts(WorkloadConfig(), path, 9, tokens)) == [
        Prompt(short, 6)
    ]
    fixed = WorkloadConfig(sharegpt_output_len=33)
    assert asyncio.run(conversation_prompts(fixed, path, 9, tokens)) == [Prompt(short, 33)]


def test_files_of_prompts_are_read_and_repeated(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("first\n\nsecond\n")
    assert read_json_lines_or_text(text, 9) == [Prompt("first", 9), Prompt("second", 9)]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": [1, 2]}\n')
    assert read_json_lines_or_text(lines, 9) == [Prompt("a", 3), Prompt([1, 2], 9)]
    workload = WorkloadConfig(
        dataset_name="custom", dataset_path=str(text), num_prompts=4, num_warmups=1
    )
    tokens: Any = WordTokens()
    prompts = asyncio.run(make_prompts(workload, tokens, as_text=True))
    assert [prompt.content for prompt in prompts] == ["first", "second"] * 2 + ["first"]


@pytest.mark.parametrize(
    "content", ["not json", '"text"', "{}", '{"prompt": 3}', '{"prompt": "a", "output_tokens": 0}']
)
def test_invalid_line_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + content)
    with pytest.raises(BenchError, match=r"prompts\.jsonl:2"):
        read_json_lines_or_text(path, 1)


@pytest.mark.parametrize(
    ("name", "content"), [("sharegpt", "{}"), ("sharegpt", "x"), ("sharegpt", "[]"), ("custom", "")]
)
def test_an_unusable_dataset_is_refused(tmp_path: Path, name: Any, content: str) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    tokens: Any = WordTokens()
    for chosen in (str(path), str(tmp_path / "absent"), None):
        workload = WorkloadConfig(dataset_name=name, dataset_path=chosen)
        with pytest.raises(BenchError):
            asyncio.run(make_prompts(workload, tokens, as_text=False))


def test_request_bodies_have_expected_fields() -> None:
    workload = WorkloadConfig(ignore_eos=True, temperature=0.5, extra_body='{"x": 1}')
    [body] = request_bodies(workload, [Prompt([1, 2], 3)], "m", chat=False)
    assert json.loads(body) == {
        "model": "m", "prompt": [1, 2], "max_tokens": 3, "temperature": 0.5, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "x": 1,
    }  # fmt: skip
    plain = WorkloadConfig(stream=False)
    [body] = request_bodies(plain, [Prompt("hi", 3)], "m", chat=True)
    assert json.loads(body) == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3
    }  # fmt: skip
