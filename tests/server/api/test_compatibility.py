"""The compatibility table of request fields matches the running application."""

import logging
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from benchmarks.hostile.operations import OPERATIONS
from engine.shared.pooling import Task
from scripts.write_docs import documented
from server.api import compatibility
from server.api.compatibility import rows_of
from server.schema.support import Row, Rows
from tests.server.conftest import Http

TABLE: dict[str, Rows] = {path: rows_of(body) for body, (path, *_) in documented().items()}
"""Handling of each endpoint's fields."""


def right_body(path: str) -> dict[str, Any]:
    body = OPERATIONS[path].rights[0]
    return body | ({"model": "tiny"} if "model" in body else {})


BODIES = {path: right_body(path) for path in TABLE if "conversations" not in path}

TASKS: dict[str, Task] = {
    "/v1/embeddings": "embed",
    "/pooling": "embed",
    "/classify": "classify",
    "/score": "embed",
    "/rerank": "embed",
}
"""Handling of fields on endpoints of pooling models."""


@pytest.fixture
def http(request: pytest.FixtureRequest) -> Any:
    """An app with a model of the endpoint's kind."""
    path = getattr(request.node, "callspec", None) and request.node.callspec.params.get("path")
    return at(request, path or "/v1/completions")


def at(request: pytest.FixtureRequest, path: str) -> Any:
    if path not in TASKS:
        return Http(request.getfixturevalue("app"))
    return request.getfixturevalue("pooling_http")(task=TASKS[path])


def rows(path: str, state: str) -> Iterator[tuple[str, Row]]:
    return ((name, row) for name, row in TABLE[path].items() if row.state == state)


def test_every_row_with_a_difference_has_a_reason() -> None:
    for fields in TABLE.values():
        for name, row in fields.items():
            assert bool(row.why) == (row.state != "same"), name


@pytest.mark.parametrize("path", TABLE)
def test_refused_fields_are_named(http: Any, path: str) -> None:
    for name, row in rows(path, "refused"):
        answer = http.post(path, {**BODIES[path], name: row.example})
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert error.get("param", name) == name, "Anthropic's clients know no params"
        assert error["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("path", TABLE)
def test_neutral_values_of_refused_fields_are_accepted(http: Any, path: str) -> None:
    for name, row in (*rows(path, "refused"), *rows(path, "ignored")):
        for neutral in (None, *row.neutral):
            answer = http.post(path, {**BODIES[path], name: neutral})
            assert answer.status_code == 200, (name, neutral)


@pytest.mark.parametrize("path", BODIES)
def test_ignored_fields_change_nothing(
    request: pytest.FixtureRequest, engines: Any, path: str
) -> None:
    """Ignored fields change neither the engine requests nor the answer."""
    http = at(request, path)

    def asked(body: dict[str, Any]) -> tuple[list[Any], str] | None:
        before = len(engines.streams)
        answer = http.post(path, body)
        if answer.status_code == 400:
            return None  # a value of the wrong type
        assert answer.status_code == 200, answer.text
        sent = [
            (each.prompt_token_ids, each.sampling, each.pooling, each.cache_root, each.tenant)
            for each in engines.streams[before:]
        ]
        return sent, _MADE_UP.sub("", answer.text)

    fixed = {**BODIES[path], **({"seed": 7} if "seed" in TABLE[path] else {})}
    plain = asked(fixed)
    for name, _ in rows(path, "ignored"):
        found = [asked({**fixed, name: value}) for value in _ANYTHING]
        found = [each for each in found if each is not None]
        assert found, name
        for each in found:
            assert each == plain, name


_ANYTHING: list[Any] = [True, False, 3, "x", ["x"], {}, {"a": "b"}]
_MADE_UP = re.compile(
    r'"(id|created|created_at|completed_at|request_id|metadata|service_tier|max_tool_calls'
    r'|safety_identifier|prompt_cache_key|prompt_cache_retention)":("[^"]*"|[^,{}]+|\{[^}]*\})'
)
"""Fields that differ between identical requests, and fields echoed in answers."""


def test_refused_field_is_found_under_all_spellings(http: Any) -> None:
    body = b'{"prompt": "hello", "kv\\u005ftransfer_params": true}'
    headers = {"content-type": "application/json"}
    answer = http.request("POST", "/v1/completions", content=body, headers=headers)
    assert answer.json()["error"]["param"] == "kv_transfer_params"


def test_true_does_not_count_as_neutral_one(http: Any) -> None:
    body = {**BODIES["/v1/completions"], "length_penalty": True}
    assert http.post("/v1/completions", body).status_code == 400


WRITING = [
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses",
    "/v1/messages",
]  # fmt: skip


@pytest.mark.parametrize("path", WRITING)
def test_fields_of_other_endpoints_are_not_ignored(path: str) -> None:
    honoured = {name for each in WRITING for state in HONOURED for name, _ in rows(each, state)}
    listed = {*TABLE[path], "user", "stream_options"}  # these do not change answers here
    assert honoured <= listed
    assert {name for name, row in TABLE[path].items() if row.foreign}


HONOURED = ("same", "different")


def test_unknown_fields_are_ignored(request: pytest.FixtureRequest) -> None:
    for path, body in BODIES.items():
        assert at(request, path).post(path, {**body, "unheard_of": {"of": [1]}}).status_code == 200


def test_last_of_duplicate_values_counts(http: Any) -> None:
    body = b'{"prompt": "hello", "kv_transfer_params": null, "kv_transfer_params": true}'
    headers = {"content-type": "application/json"}
    answer = http.request("POST", "/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400


PUBLISHED = [
    ("/v1/completions", "openai.types:CompletionCreateParams"),
    ("/v1/chat/completions", "openai.types.chat:CompletionCreateParams"),
    ("/v1/embeddings", "openai.types:EmbeddingCreateParams"),
    ("/v1/responses", "openai.types.responses:ResponseCreateParams"),
    ("/v1/responses", "openai.types.responses:InputTokenCountParams"),
    ("/v1/conversations", "openai.types.conversations:ConversationCreateParams"),
    ("/v1/messages", "anthropic.types.beta:MessageCreateParams"),
    ("/v1/messages/count_tokens", "anthropic.types.beta:MessageCountTokensParams"),
]
"""Parameters of the published clients, read from their installed libraries."""
_HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of Anthropic's client that it sends as headers."""


@pytest.mark.parametrize(("path", "name"), PUBLISHED)
def test_every_parameter_of_the_published_clients_is_listed(path: str, name: str) -> None:
    parameters = pkgutil.resolve_name(name)
    kinds = get_args(parameters) or (parameters,)
    names = {name for kind in kinds for name in get_type_hints(kind)} - _HEADERS
    assert len(names) > 1
    assert names <= TABLE[path].keys()


_VLLM_GENERATION = (
    "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty "
    "watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens "
    "response_format structured_outputs priority request_id session_id return_token_ids "
    "return_tokens_as_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs "
    "cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection "
    "thinking_token_budget stream_interval "
)
_VLLM_POOLING = (
    "model user truncate_prompt_tokens padding truncation_side request_id priority "
    "mm_processor_kwargs cache_salt use_activation "
)
_VLLM_TURNS = (
    "messages add_generation_prompt continue_final_message add_special_tokens chat_template "
    "chat_template_kwargs media_io_kwargs "
)
_VLLM_VECTORS = f"{_VLLM_POOLING}{_VLLM_TURNS}input encoding_format embed_dtype endianness "
_VLLM_MESSAGES = "model messages system tools tool_choice chat_template_kwargs "
VLLM = {
    "/v1/completions": f"{_VLLM_GENERATION}prompt echo suffix prompt_embeds",
    "/v1/chat/completions": (
        f"{_VLLM_GENERATION}{_VLLM_TURNS}top_logprobs max_completion_tokens tools tool_choice "
        "reasoning_effort include_reasoning parallel_tool_calls echo documents mm_processor_kwargs "
        "return_prompt_text"
    ),
    "/v1/responses": (
        "background include input instructions max_output_tokens max_tool_calls metadata model "
        "logit_bias parallel_tool_calls previous_response_id prompt reasoning include_reasoning "
        "service_tier store stream temperature text tool_choice tools top_logprobs top_p top_k "
        "truncation user skip_special_tokens include_stop_str_in_output presence_penalty "
        "frequency_penalty prompt_cache_key request_id session_id media_io_kwargs "
        "mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages "
        "previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs "
        "kv_transfer_params ec_transfer_params chat_template_kwargs"
    ),
    "/v1/messages": (
        f"{_VLLM_MESSAGES}max_tokens metadata output_config stop_sequences stream temperature "
        "top_k top_p kv_transfer_params"
    ),
    "/v1/messages/count_tokens": _VLLM_MESSAGES,
    "/v1/embeddings": f"{_VLLM_VECTORS}dimensions",
    "/pooling": f"{_VLLM_VECTORS}dimensions task data",
    "/classify": f"{_VLLM_POOLING}{_VLLM_TURNS}input",
    "/score": (
        f"{_VLLM_POOLING}data_1 data_2 queries documents items text_1 text_2 label_token_ids"
    ),
    "/rerank": f"{_VLLM_POOLING}query documents top_n",
    "/tokenize": f"{_VLLM_TURNS}model prompt return_token_strs mm_processor_kwargs tools",
    "/detokenize": "model tokens",
}
"""The parameters of vLLM's servers: `vllm/entrypoints` of its repository, 2026."""


@pytest.mark.parametrize("path", VLLM)
def test_every_parameter_of_vllm_is_listed(path: str) -> None:
    assert set(VLLM[path].split()) <= TABLE[path].keys()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses",
                                  "/v1/messages"])  # fmt: skip
@pytest.mark.parametrize(
    "fields",
    [{"regex": "a+"}, {"ebnf": 'root ::= "a"'}, {"json_schema": {"type": "object"}},
     {"grammar": "start: A"}, {"choice": ["a"]}, {"format": "json"}, {"guided_regex": "a+"}],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_constraints_of_other_servers_are_never_dropped(
    http: Any, path: str, fields: dict[str, Any]
) -> None:
    answer = http.post(path, {**BODIES[path], **fields})
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["error"]["message"]


def test_an_unknown_field_is_logged_once(
    http: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "_logged", set())
    caplog.set_level(logging.INFO, compatibility.__name__)
    body = {**BODIES["/v1/completions"], "never_heard_of": "secret", "not a name\n": 1}
    for _ in range(2):
        assert http.post("/v1/completions", body).status_code == 200
    (said,) = [each.getMessage() for each in caplog.records if each.name == compatibility.__name__]
    assert "never_heard_of" in said
    assert "secret" not in said


def test_number_of_logged_unknown_fields_is_limited(
    http: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "_logged", set())
    caplog.set_level(logging.INFO, compatibility.__name__)
    body = {**BODIES["/v1/completions"], **{f"unknown_{i}": i for i in range(300)}}
    assert http.post("/v1/completions", body).status_code == 200
    assert len([each for each in caplog.records if each.name == compatibility.__name__]) == 256
