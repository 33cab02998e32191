"""Anthropic's Messages API, used by its client and with raw requests."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer

from server.config import FrontEndConfig, GuardConfig
from server.config.answer import AnswerConfig
from server.text.tokenizer import ServedTokenizer
from tests.server.conftest import prompt_of, tiny, tokenizer_with

if TYPE_CHECKING:
    import anthropic  # takes a second, in each process that collects these tests

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}:"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def tokenizer(backend: Tokenizer) -> ServedTokenizer:
    return tokenizer_with(backend, TEMPLATE, AddedToken("<think>"), AddedToken("</think>"))


@pytest.fixture
def config(request: pytest.FixtureRequest) -> FrontEndConfig:
    return tiny(
        answer=AnswerConfig(reasoning_parser="qwen3"),
        guards=getattr(request, "param", GuardConfig()),
    )


@pytest.fixture
def client(served: Any, app: FastAPI, engines: Any) -> "Iterator[anthropic.Anthropic]":
    import anthropic

    engines.context = 4096
    with (
        served(app) as url,
        anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as made,
    ):
        yield made


def test_text_message_is_answered(client: "anthropic.Anthropic", engines: Any) -> None:
    import anthropic

    message = client.messages.create(model="tiny", max_tokens=50, messages=HELLO, system="Be kind.")
    (block,) = message.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == "hello world"
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", "tiny")
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0
    assert prompt_of(engines) == "<|system|>Be kind.<|user|>hello<|assistant|>"


def test_thinking_text_and_calls_are_blocks_in_message_and_stream(
    client: "anthropic.Anthropic", engines: Any
) -> None:
    import anthropic

    engines.script = engines.answer(f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}")
    asked: Any = {"model": "tiny", "max_tokens": 400, "messages": HELLO, "tools": [WEATHER]}
    message = client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    call = message.content[2]
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"

    def shown(whole: "anthropic.types.Message") -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id"}) for block in whole.content]

    assert shown(streamed) == shown(message)
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == message.usage.output_tokens


def test_tool_results_become_messages(http: Any, engines: Any) -> None:
    used = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "rain", "is_error": True}
    said = {"type": "text", "text": "and now?"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thought, used]},
        {"role": "user", "content": [result, said]},
    ]
    body = {"model": "tiny", "max_tokens": 9, "messages": messages, "tools": [WEATHER]}
    assert http.post("/v1/messages", body).status_code == 200
    assert prompt_of(engines).endswith(
        "<|user|>hello<|assistant|><think>hm</think>"
        '<tool_call>get_weather:{"city": "Oslo"}</tool_call>'
        "<|tool|>Error: rain<|user|>and now?<|assistant|>"
    )


def test_prefilled_answer_is_continued(http: Any, engines: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    body = {"model": "tiny", "max_tokens": 9, "messages": messages}
    assert http.post("/v1/messages", body).status_code == 200
    assert prompt_of(engines) == "<|user|>hello<|assistant|>The answer is"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 1}, "max_tokens", None),
        ({"max_tokens": 50, "stop_sequences": ["world"]}, "stop_sequence", "world"),
    ],
)
def test_stop_reason_is_returned(
    http: Any, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = http.post("/v1/messages", {"model": "tiny", "messages": HELLO, **fields}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("thinking", "prompt", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 5}, "[True]", True),
        ({"type": "adaptive", "display": "omitted"}, "[True]", False),
        ({"type": "disabled"}, "[False]", False),
    ],
)
def test_thinking_can_be_requested(
    http: Any, engines: Any, thinking: dict[str, Any], prompt: str, shown: bool
) -> None:
    engines.script = engines.answer("<think>hm</think>Yes.")
    body = {"model": "tiny", "max_tokens": 50, "messages": HELLO, "thinking": thinking}
    content = http.post("/v1/messages", body).json()["content"]
    assert prompt_of(engines).endswith(prompt)
    sampling = engines.streams[-1].sampling
    assert sampling.grammar_budget == thinking.get("budget_tokens", 0)
    assert sampling.grammar_after == ("</think>" if "budget_tokens" in thinking else "")
    assert ("thinking" in [block["type"] for block in content]) is shown


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}, False),
    ],
)
def test_calls_can_be_enforced(
    http: Any, engines: Any, choice: dict[str, Any], parallel: bool
) -> None:
    body = {"model": "tiny", "max_tokens": 50, "messages": HELLO, "tools": [WEATHER]}
    http.post("/v1/messages", {**body, "tool_choice": choice})
    grammar = engines.streams[-1].sampling.grammar
    assert "get_weather" in grammar.text
    assert ("call)*" in grammar.text) is parallel


def test_answer_can_follow_a_schema(http: Any, engines: Any) -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    for field in ({"output_config": {"format": format}}, {"output_format": format}):
        http.post("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": HELLO, **field})
        assert json.loads(engines.streams[-1].sampling.grammar.schema) == {"type": "object"}


def test_tokens_are_counted_as_the_model_reads_them(
    client: "anthropic.Anthropic", engines: Any
) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "system": "Be kind."}
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    counted = client.messages.count_tokens(**asked)
    message = client.messages.create(max_tokens=5, **asked)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_result", "tool_use_id": "a"}]}]}, "messages[0].content[0]"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [SEARCH, {**WEATHER, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "nonsense"}}],
          "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"temperature": 3}, "temperature"),
        ({"model": "other"}, "other"),
    ],
)  # fmt: skip
def test_invalid_fields_are_reported_in_anthropic_format(
    http: Any, fields: dict[str, Any], place: str
) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, **fields}
    answer = http.post("/v1/messages", body)
    assert answer.status_code == (404 if place == "other" else 400)
    error = answer.json()
    assert error["type"] == "error"
    kind = "not_found_error" if place == "other" else "invalid_request_error"
    assert error["error"]["type"] == kind
    assert place in error["error"]["message"]


def test_stream_failure_is_an_event(http: Any, engines: Any) -> None:
    whole = engines.script
    engines.script = lambda made: [*whole(made)[:2], RuntimeError("broken")]
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "stream": True}
    *_, last, end = http.post("/v1/messages", body).text.split("\n\n")
    assert end == ""
    assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"api_error",')
    assert "broken" not in last


@pytest.mark.parametrize("config", [GuardConfig(api_key=("secret",))], indirect=True)
def test_anthropic_client_keys_are_accepted(client: "anthropic.Anthropic", http: Any) -> None:
    assert client.messages.create(model="tiny", max_tokens=5, messages=HELLO).content
    stranger = client.with_options(api_key="wrong")
    import anthropic

    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="tiny", max_tokens=5, messages=HELLO)


def test_too_many_tool_results_and_calls_are_named(http: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    call = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {}}
    for blocks, role, field in (
        ([result] * 1000, "user", "messages[2].content[48]"),
        ([call] * 129, "assistant", "messages[0].content[128]"),
    ):
        turns = [{"role": role, "content": blocks}] * 3
        answer = http.post("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": turns})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_required_tool_that_was_removed_is_refused(http: Any, choice: Any) -> None:
    tool = {"type": "tool_reference", "name": "get_weather"}
    removal = {"role": "system", "content": [{"type": "tool_removal", "tool": tool}]}
    body = {"messages": [*HELLO, removal, *HELLO], "tools": [WEATHER, SEARCH]}
    answer = http.post(
        "/v1/messages", {"model": "tiny", "max_tokens": 9, "tool_choice": choice, **body}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "tool_choice: a tool_removal has removed 'get_weather'"
    )


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_conversation_with_only_hosted_blocks_is_refused(http: Any, path: str) -> None:
    turn = {"role": "user", "content": [{"type": "web_search_tool_result", "content": []}]}
    limit = {"max_tokens": 9} if path == "/v1/messages" else {}
    answer = http.post(path, {"model": "tiny", "messages": [turn], **limit})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages: ")


def test_clients_of_messages_find_the_request_id_under_their_name_of_the_header(http: Any) -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    for sent in (body, {**body, "stream": True}, {**body, "max_tokens": 0}):
        headers = http.post("/v1/messages", sent).headers
        assert headers["request-id"] == headers["x-request-id"]
