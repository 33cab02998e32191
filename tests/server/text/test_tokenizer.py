import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.shared.config import ModelConfig
from server.text.chat_template import Rendering
from server.text.tokenizer import ServedTokenizer, TokenizerError
from tests.server.tokens import id_of


@pytest.fixture
def directory(tmp_path: Path, backend: Tokenizer) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory: Path, **files: Any) -> None:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def load(directory: Path, **fields: Any) -> ServedTokenizer:
    return ServedTokenizer.load(directory, ModelConfig(**fields))


def render(tokenizer: ServedTokenizer, **options: Any) -> str:
    assert tokenizer.chat_template is not None
    said = [{"role": "user", "content": "x"}]
    return tokenizer.chat_template.render(
        Rendering(messages=said, add_generation_prompt=True, **options)
    )


def test_missing_tokenizer_gives_advice(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*save_pretrained"):
        load(tmp_path)


def test_broken_files_are_named(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        load(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load(directory)


def test_vocabulary_and_end_come_from_the_models_files(directory: Path) -> None:
    write(directory, config={"vocab_size": 512, "eos_token_id": 1})
    assert load(directory).vocab_size == 512
    assert load(directory).eos_token_ids == {1}
    write(directory, generation_config={"eos_token_id": [1, 2]})
    assert load(directory).eos_token_ids == {1, 2}


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_answers_end_at_eos_token_of_tokenizer(
    directory: Path, backend: Tokenizer, file: str
) -> None:
    write(directory, config={"eos_token_id": 0}, generation_config={"eos_token_id": 0})
    write(directory, **{file: {"eos_token": "<|eos|>"}})
    assert load(directory).eos_token_ids == {0, id_of(backend, "<|eos|>")}


def test_tokens_that_only_the_tokenizer_s_config_has_are_added(
    directory: Path, backend: Tokenizer
) -> None:
    """Like AutoTokenizer, the reference for texts and ids."""
    count = backend.get_vocab_size()
    added = {
        str(count): {"content": "<|call|>", "special": False, "normalized": False},
        str(count + 1): {"content": "<|hush|>", "special": True, "__type": "AddedToken"},
    }
    write(directory, tokenizer_config={"added_tokens_decoder": added})
    tokenizer = load(directory)
    text = "a<|call|>b<|hush|>"
    found = tokenizer.encode(text, add_special_tokens=False)
    reference: Any = PreTrainedTokenizerFast.from_pretrained(directory)
    assert found == reference.encode(text, add_special_tokens=False)
    assert {count, count + 1} <= set(found)
    assert tokenizer.decode(found, skip_special_tokens=True) == "a<|call|>b"
    write(directory, tokenizer_config={"added_tokens_decoder": {"x": {"content": "y"}}})
    with pytest.raises(TokenizerError, match="added_tokens_decoder: invalid literal"):
        load(directory)


def test_texts_are_lowercased_as_configured_by_sentence_transformers(directory: Path) -> None:
    cased, lowered = (load(directory).encode(each, add_special_tokens=False) for each in "Aa")
    assert cased != lowered
    write(directory, sentence_bert_config={"do_lower_case": True})
    assert load(directory).encode("A", add_special_tokens=False) == lowered
    write(directory, sentence_bert_config={"do_lower_case": False})
    assert load(directory).encode("A", add_special_tokens=False) == cased


def test_without_model_files_the_tokenizer_decides(directory: Path, backend: Tokenizer) -> None:
    write(directory, tokenizer_config={"eos_token": {"content": "<|eos|>"}})
    tokenizer = load(directory)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eos_token_ids == {id_of(backend, "<|eos|>")}
    assert tokenizer.is_special(id_of(backend, "<|eos|>"))
    assert not tokenizer.is_special(id_of(backend, "«mark»"))


def test_chat_templates_are_found_in_order_of_preference(directory: Path, tmp_path: Path) -> None:
    assert load(directory).chat_template is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    write(directory, tokenizer_config={"chat_template": named})
    assert render(load(directory)) == "named"
    assert render(load(directory), tools=[{"name": "f"}]) == "tools"
    write(directory, tokenizer_config={"chat_template": "own {{ bos_token }}", "bos_token": "<s>"})
    assert render(load(directory)) == "own <s>"
    (directory / "chat_template.jinja").write_text("file")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    assert render(load(directory), tools=[{"name": "f"}]) == "file for tools"
    assert render(load(directory)) == "file"
    given = tmp_path / "given.jinja"
    given.write_text("given")
    assert render(load(directory, chat_template=str(given))) == "given"
    with pytest.raises(TokenizerError, match="--chat-template"):
        load(directory, chat_template=str(tmp_path / "absent.jinja"))


def test_the_template_has_arguments_that_requests_do_not_set(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ thinks }} {{ bos_token }}")
    write(directory, tokenizer_config={"bos_token": "<s>"})
    tokenizer = load(directory, default_chat_template_kwargs='{"thinks": false}')
    assert render(tokenizer) == "False <s>"
    assert render(tokenizer, arguments={"thinks": True}) == "True <s>"


@pytest.mark.parametrize("wrong", ["{", "[]", '{"tools": []}'])
def test_wrong_defaults_of_the_template_are_refused_at_start(directory: Path, wrong: str) -> None:
    (directory / "chat_template.jinja").write_text("a")
    with pytest.raises(TokenizerError, match="--default-chat-template-kwargs"):
        load(directory, default_chat_template_kwargs=wrong)


def test_a_broken_chat_template_is_refused_at_start(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="chat template, line 1"):
        load(directory)
