"""A model's pooling method, from its files and settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.shared.config import ModelConfig
from engine.shared.pooling import BadPooling, LogitScale, PoolingSpec, TokenPooling, read_pooling


def _read(directory: Path, config: dict[str, Any], **settings: Any) -> PoolingSpec | None:
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8} | config))
    return read_pooling(directory, ModelConfig(model=str(directory), **settings))


def _sentence(directory: Path, pooling: dict[str, Any], *modules: str) -> None:
    entries = [
        {"idx": i, "path": "" if name == "Transformer" else f"{i}_{name}", "type": f"a.b.{name}"}
        for i, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_model_task_follows_from_architecture(tmp_path: Path) -> None:
    assert _read(tmp_path, {"architectures": ["LlamaForCausalLM"]}) is None
    assert _read(tmp_path, {"architectures": ["LlamaForCausalLM"]}, runner="generate") is None
    assert _read(tmp_path, {"architectures": ["GPT2LMHeadModel"]}) is None
    embeds = {
        "BertModel": "cls",
        "BertForMaskedLM": "cls",
        "ModernBertModel": "cls",
        "Qwen3Model": "last",
    }
    for name, pooling in embeds.items():
        spec = _read(tmp_path, {"architectures": [name]})
        assert spec is not None
        assert (spec.task, spec.pooling, spec.size) == ("embed", pooling, 8)
    forced = _read(tmp_path, {"architectures": ["LlamaForCausalLM"]}, runner="pooling")
    assert forced is not None
    assert (forced.pooling, forced.normalize, forced.in_one_step) == ("last", True, False)


def test_labels_and_activation_of_classifiers_are_read(tmp_path: Path) -> None:
    named = {"architectures": ["BertForSequenceClassification"]}
    spec = _read(tmp_path, named | {"id2label": {"1": "good", "0": "bad"}})
    assert spec is not None
    assert (spec.task, spec.labels, spec.activation) == ("classify", ("bad", "good"), "softmax")
    one = named | {"id2label": {"0": "LABEL_0"}}
    activation = "sbert_ce_default_activation_function"
    cases: dict[str, dict[str, Any]] = {
        "sigmoid": one,
        "identity": one | {activation: "torch.nn.modules.linear.Identity"},
        "softmax": one | {"sentence_transformers": {"activation_fn": "torch.nn.Softmax"}},
    }
    for wanted, config in cases.items():
        spec = _read(tmp_path, config)
        assert spec is not None
        assert spec.activation == wanted
    with pytest.raises(BadPooling, match=r"activation 'torch.nn.Tanh' is not supported"):
        _read(tmp_path, one | {activation: "torch.nn.Tanh"})


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
    ],
)
def test_the_files_of_sentence_transformers_are_read(
    pooling: dict[str, Any], found: str, tmp_path: Path
) -> None:
    _sentence(tmp_path, pooling, "Transformer", "Pooling", "Normalize")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    prompts = {"query": "q: ", "passage": "p: "}
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": "query"})
    )
    spec = _read(tmp_path, {"architectures": ["Qwen3ForCausalLM"], "is_matryoshka": True})
    assert spec is not None
    assert (spec.pooling, spec.normalize, spec.max_length) == (found, True, 100)
    assert (spec.prompts, spec.default_prompt, spec.dimensions) == (prompts, "query", ())
    assert spec.similarity == "cosine"
    _sentence(tmp_path, pooling, "Transformer", "Pooling")
    said = tmp_path / "config_sentence_transformers.json"
    said.write_text('{"similarity_fn_name": "dot"}')
    spec = _read(tmp_path, {"architectures": ["BertModel"]})
    assert spec is not None
    assert (spec.normalize, spec.similarity) == (False, "dot")
    said.write_text('{"similarity_fn_name": "hamming"}')
    with pytest.raises(BadPooling, match="similarity_fn_name 'hamming' is not supported, only co"):
        _read(tmp_path, {"architectures": ["BertModel"]})


def test_settings_override_files(tmp_path: Path) -> None:
    _sentence(tmp_path, {"pooling_mode": "mean"}, "Transformer", "Pooling", "Normalize")
    text = '{"pooling_type": "CLS", "normalize": false, "max_embed_len": 9, "dimensions": [2, 4]}'
    spec = _read(tmp_path, {"architectures": ["BertModel"]}, pooler_config=text)
    assert spec is not None
    assert (spec.pooling, spec.normalize, spec.max_length) == ("cls", False, 9)
    assert spec.dimensions == (2, 4)


LLAMA = {"architectures": ["LlamaModel"]}
SCORES = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        (LLAMA, '{"seq_pooling_type": "MEAN"}', {"pooling": "mean", "tokens": None}),
        (LLAMA, '{"tok_pooling_type": "ALL"}', {"pooling": "last", "tokens": TokenPooling()}),
        (LLAMA, '{"pooling_type": "ALL"}', {"tokens": TokenPooling(True)}),
        (LLAMA, '{"task": "token_embed"}', {"tokens": TokenPooling(True)}),
        (
            SCORES,
            '{"tok_pooling_type": "STEP", "step_tag_id": 7, "seq_pooling_type": "CLS"}',
            {"pooling": "cls", "tokens": TokenPooling(False, 7)},
        ),
        (LLAMA, '{"dimensions": 4}', {"usual_dimensions": 4, "dimensions": (4,)}),
        (
            LLAMA | {"matryoshka_dimensions": [2, 4]},
            '{"dimensions": 4}',
            {"usual_dimensions": 4, "dimensions": (2, 4)},
        ),
        (SCORES, '{"softmax": false}', {"activation": "identity"}),
        (SCORES, '{"activation": false}', {"activation": "identity"}),
        (SCORES, '{"activation": true}', {"activation": "softmax"}),
        (SCORES, '{"use_activation": true}', {"activation": "softmax"}),
        (SCORES, '{"activation": "sigmoid"}', {"activation": "sigmoid"}),
        (SCORES, '{"logit_mean": 2}', {"logits": LogitScale(2.0, 1.0)}),
        (SCORES, '{"logit_sigma": 4, "logit_mean": 2}', {"logits": LogitScale(2.0, 4.0)}),
        (LLAMA, '{"enable_chunked_processing": false}', {"pooling": "last"}),
    ],
    ids=str,
)
def test_pooler_config_accepts_vllm_names(
    config: dict[str, Any], text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    spec = _read(tmp_path, config, pooler_config=text)
    assert spec is not None
    assert {name: getattr(spec, name) for name in expected} == expected
    assert spec.in_one_step is (spec.pooling != "last" or spec.tokens is not None)


@pytest.mark.parametrize(
    ("config", "text", "reason"),
    [
        (LLAMA, '{"pooling_type": "CLS", "seq_pooling_type": "CLS"}', "pooling_type stands for"),
        (LLAMA, '{"pooling_type": "ALL", "tok_pooling_type": "ALL"}', "pooling_type stands for"),
        (LLAMA, '{"tok_pooling_type": "STEP"}', "step_tag_id and STEP need each other"),
        (LLAMA, '{"tok_pooling_type": "ALL", "step_tag_id": 1}', "step_tag_id and STEP"),
        (LLAMA, '{"logit_mean": 1}', "logit_mean and logit_sigma are for classifiers"),
        (SCORES, '{"logit_sigma": 0}', "logit_sigma not 0"),
        (SCORES, '{"logit_mean": 1e999}', "--pooler-config"),
        (SCORES, '{"dimensions": 2}', "dimensions are for embeddings"),
        (LLAMA, '{"dimensions": 9}', "embeddings have 8 numbers"),
        (LLAMA, '{"enable_chunked_processing": true}', "enable_chunked_processing"),
        (LLAMA, '{"returned_token_ids": [1, 2]}', "returned_token_ids is not supported"),
        (LLAMA, '{"task": "token_classify"}', "LlamaModel cannot token_classify"),
        (SCORES, '{"task": "score"}', "task"),
        (LLAMA, '{"activation": "tanh"}', "activation"),
        (LLAMA, '{"pooling_typ": "CLS"}', "unknown field `pooling_typ`"),
        (LLAMA, '{"step_tag_id": -1}', "step_tag_id"),
    ],
    ids=str,
)
def test_invalid_pooler_config_is_refused(
    config: dict[str, Any], text: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BadPooling, match=reason) as refused:
        _read(tmp_path, config, pooler_config=text)
    assert str(refused.value).startswith("--pooler-config: ")


def test_unsupported_pooling_is_refused_by_name(tmp_path: Path) -> None:
    bert = {"architectures": ["BertModel"]}
    with pytest.raises(BadPooling, match="--runner generate: BertModel generates nothing"):
        _read(tmp_path, bert, runner="generate")
    with pytest.raises(BadPooling, match="this model generates; set --runner pooling"):
        _read(tmp_path, {"architectures": ["LlamaForCausalLM"]}, pooler_config='{"task":"embed"}')
    with pytest.raises(BadPooling, match="BertModel cannot classify"):
        _read(tmp_path, bert, pooler_config='{"task": "classify"}')
    for text in (
        '{"pooling_type": "STEP"}',
        '{"pooling": 1}',
        '{"step_tag_id": 5}',
        '{"task": 1}',
        "[]",
        "{",
        '{"dimensions": [0]}',
    ):
        with pytest.raises(BadPooling, match="--pooler-config"):
            _read(tmp_path, bert, pooler_config=text)
    for pooling in (
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": ["cls", "mean"]},
        {},
        {"pooling_mode": "mean", "include_prompt": False},
    ):
        _sentence(tmp_path, pooling, "Transformer", "Pooling")
        with pytest.raises(BadPooling, match="not supported"):
            _read(tmp_path, bert)
    _sentence(tmp_path, {"pooling_mode": "mean"}, "Transformer", "Pooling", "Dense")
    with pytest.raises(BadPooling, match="modules Dense are not supported"):
        _read(tmp_path, bert)
