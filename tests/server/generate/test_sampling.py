"""Sampling fields, and the defaults of the model."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.shared.config import ModelConfig
from server.config import FrontEndConfig
from server.generate.specification import bad_word_tokens
from server.schema.fields import SamplingFields
from server.text.detokenizer import TokenTable
from server.text.sampling_defaults import (
    BadGenerationConfig,
    SamplingDefaults,
    read_sampling_defaults,
)
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import Http, app_of

BOTH = pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])


def body(endpoint: str, **fields: Any) -> dict[str, Any]:
    if endpoint == "/v1/completions":
        return {"prompt": "hello", **fields}
    return {"messages": [{"role": "user", "content": "hello"}], **fields}


@BOTH
def test_limits_on_tokens_reach_the_engine(http: Any, engines: Any, endpoint: str) -> None:
    fields = {"allowed_token_ids": [9, 4, 9], "bad_words": ["hello", " hello"]}
    assert http.post(endpoint, body(endpoint, **fields)).status_code == 200
    sampling = engines.streams[0].sampling
    assert sampling.allowed_token_ids == (4, 9)
    hello = engines.tokenizer.encode("hello", add_special_tokens=False)
    assert sampling.bad_words[0] == tuple(hello)
    assert http.post(endpoint, body(endpoint, bad_words=None)).status_code == 200
    sampling = engines.streams[1].sampling
    assert (sampling.allowed_token_ids, sampling.bad_words) == (None, ())


def test_prompt_logprobs_are_by_token_id(http: Any, engines: Any) -> None:
    found = http.complete(prompt=[[5, 6, 7], [8, 9]], prompt_logprobs=2)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in found] == [3, 2]
    first, second, _ = found[0]["prompt_logprobs"]
    assert first is None
    assert next(iter(second)) == "6", "the token itself comes first"
    assert set(second["6"]) == {"logprob", "rank", "decoded_token"}
    assert second["6"]["decoded_token"] == TokenTable(engines.tokenizer).name_of(6)
    assert 2 <= len(second) <= 3
    assert http.complete()["choices"][0]["prompt_logprobs"] is None


def test_prompt_logprobs_of_chat_are_next_to_choices(http: Any, engines: Any) -> None:
    answer = http.chat(prompt_logprobs=0, n=2)
    assert len(answer["prompt_logprobs"]) == len(engines.streams[0].prompt_token_ids)
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])
    assert http.chat()["prompt_logprobs"] is None


def test_echo_and_prompt_logprobs_have_requested_alternatives(http: Any) -> None:
    choice = http.complete(prompt=[5, 6, 7], echo=True, logprobs=1, prompt_logprobs=3)["choices"][0]
    assert all(len(entry) <= 2 for entry in choice["logprobs"]["top_logprobs"][1:])
    assert all(3 <= len(entry) <= 4 for entry in choice["prompt_logprobs"][1:])


def test_bad_words_are_forbidden_at_start_and_after_space(backend: Tokenizer) -> None:
    tokenizer = ServedTokenizer(backend)
    found = asyncio.run(
        bad_word_tokens(SamplingFields.model_validate({"bad_words": ["hello"]}), 1, tokenizer)
    )
    assert found[0] == tuple(tokenizer.encode("hello", add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" hello", add_special_tokens=False))
    assert (spaced in found) == (len(spaced) == len(found[0]))


def test_omitted_parameters_have_model_defaults(
    config: FrontEndConfig, engines: Any, backend: Tokenizer, http: Any
) -> None:
    defaults = SamplingDefaults(
        temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, repetition_penalty=1.5, max_new_tokens=9
    )
    tokenizer = ServedTokenizer(backend, eos_token_ids=[0], sampling_defaults=defaults)
    http = Http(app_of(config, engines, tokenizer))
    http.complete()
    http.complete(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1, max_tokens=3)
    left_open, given = [stream.sampling for stream in engines.streams]
    assert (left_open.temperature, left_open.top_k, left_open.top_p) == (0.25, 7, 0.5)
    assert (left_open.min_p, left_open.repetition_penalty) == (0.125, 1.5)
    assert left_open.max_tokens == 9
    assert (given.temperature, given.top_k, given.top_p) == (1, 0, 1)
    assert (given.min_p, given.repetition_penalty, given.max_tokens) == (0, 1, 3)


@pytest.fixture
def model(tmp_path: Path, backend: Tokenizer) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    values = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 3, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return tmp_path


def test_defaults_are_read_from_the_model_unless_configured(model: Path) -> None:
    def load(source: str) -> SamplingDefaults:
        config = ModelConfig(model=str(model), generation_config=source)
        return ServedTokenizer.load(model, config).sampling_defaults

    assert load("auto") == SamplingDefaults(temperature=0.6, top_k=20)
    assert load(str(model)) == load("auto")
    assert load("vllm") == load("none") == SamplingDefaults()


def test_overrides_win_over_the_file(model: Path) -> None:
    def read(overrides: str) -> SamplingDefaults:
        return read_sampling_defaults(model, "auto", overrides)

    assert read('{"temperature": 0.2}') == SamplingDefaults(temperature=0.2, top_k=20)
    neutral = read_sampling_defaults(model, "none", '{"max_new_tokens": 7}')
    assert neutral == SamplingDefaults(max_new_tokens=7)
    for wrong in ("{", "[]", "7", '{"temprature": 1}', '{"temperature": -1}', '{"top_p": "x"}'):
        with pytest.raises(BadGenerationConfig, match="--override-generation-config"):
            read(wrong)


def test_files_that_cannot_be_used_are_named(model: Path, tmp_path_factory: Any) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert read_sampling_defaults(empty, "auto") == SamplingDefaults()
    with pytest.raises(BadGenerationConfig, match="--generation-config"):
        read_sampling_defaults(model, str(empty))
    for content in ('{"temperature": -1}', "[]", "{"):
        (empty / "generation_config.json").write_text(content)
        with pytest.raises(BadGenerationConfig, match=r"generation_config\.json"):
            read_sampling_defaults(empty, "auto")
