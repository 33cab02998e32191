"""Tools of /v1/responses other than functions: namespaces, shells, searches, grammars."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.shared.messages import LarkGrammar
from server.api.responses import schema
from server.api.responses.tools import chosen, offered_tools
from server.text.tokenizer import ServedTokenizer
from tests.server.api.test_chat_tools import TEMPLATE
from tests.server.conftest import prompt_of, tokenizer_with
from tests.support.cpu_time import grows_no_faster_than_input

G = {"type": "function", "name": "g", "parameters": {"type": "object", "properties": {}}}
AGENTS = {"type": "namespace", "name": "agents_v1", "description": "d", "tools": [G]}
SEARCH = {"type": "web_search", "external_web_access": False}
FIND: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "*** Begin" LF /.*/ LF\n%import common.LF',
    },
}


@pytest.fixture
def tokenizer(backend: Tokenizer) -> ServedTokenizer:
    return tokenizer_with(backend, TEMPLATE)


def respond(http: Any, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", {"model": "tiny", "input": "hello", **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def calls(engines: Any, name: str, arguments: Any) -> None:
    """Have the model write a call."""
    text = json.dumps({"name": name, "arguments": arguments})
    engines.script = engines.answer(f"<tool_call>{text}</tool_call>")


def test_functions_of_a_namespace_are_called_by_both_names(http: Any, engines: Any) -> None:
    calls(engines, "agents_v1__g", {})
    engines.context = 4096
    body = respond(http, tools=[G, AGENTS, SEARCH], tool_choice="auto")
    (item,) = body["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents_v1", "g")
    assert [tool["type"] for tool in body["tools"]] == ["function", "namespace", "web_search"]
    assert "web_search" not in prompt_of(engines)
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    respond(http, input=[{"role": "user", "content": "go"}, item, result], tools=[AGENTS])
    assert "<tool_call>agents_v1__g:{}</tool_call>" in prompt_of(engines)
    calls(engines, "g", {})
    (item,) = respond(http, tools=[G, AGENTS])["output"]
    assert "namespace" not in item


def test_local_shell_is_called_with_a_command(http: Any, engines: Any) -> None:
    calls(engines, "local_shell", {"command": ["ls", "-l"], "timeout_ms": 5})
    engines.context = 4096
    (item,) = respond(http, tools=[{"type": "local_shell"}])["output"]
    assert (item["type"], item["status"]) == ("local_shell_call", "completed")
    assert item["action"] == {
        "type": "exec", "command": ["ls", "-l"], "timeout_ms": 5,
        "working_directory": None, "env": {}, "user": None,
    }  # fmt: skip
    output = {"type": "local_shell_call_output", "id": item["call_id"], "output": "a b"}
    respond(http, input=[{"role": "user", "content": "list"}, item, output])
    assert (
        '<tool_call>local_shell:{"command": ["ls", "-l"], "timeout_ms": 5}</tool_call><|end|>'
        "<|tool|>a b<|end|>"
    ) in prompt_of(engines)
    calls(engines, "local_shell", {"command": "ls"})
    (item,) = respond(http, tools=[{"type": "local_shell"}])["output"]
    assert (item["status"], item["action"]["command"]) == ("incomplete", [])


def test_tools_found_by_search_can_be_called(http: Any, engines: Any) -> None:
    calls(engines, "tool_search", {"query": "g"})
    engines.context = 4096
    (item,) = respond(http, tools=[FIND])["output"]
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == {"query": "g"}
    found = {
        "type": "tool_search_output", "call_id": item["call_id"], "status": "completed",
        "execution": "client", "tools": [AGENTS],
    }  # fmt: skip
    calls(engines, "agents_v1__g", {})
    asked = [{"role": "user", "content": "go"}, item, found]
    (item,) = respond(http, input=asked, tools=[FIND])["output"]
    assert (item["namespace"], item["name"]) == ("agents_v1", "g")
    assert "<|tool|>Found: agents_v1." in prompt_of(engines)


def test_lark_grammar_of_custom_tool_is_enforced(http: Any, engines: Any) -> None:
    calls(engines, "apply_patch", {"input": '*** Begin\n"x"\n'})
    engines.context = 4096
    (item,) = respond(http, tools=[PATCH])["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", '*** Begin\n"x"\n')
    grammar = engines.streams[-1].sampling.grammar
    assert isinstance(grammar, LarkGrammar)
    assert r'start: "*** Begin" terminal_lf' in grammar.text
    assert "input_grammar" not in prompt_of(engines)
    assert "The input matches this lark grammar" in prompt_of(engines)


@pytest.mark.parametrize(("arguments", "status"), [('{"a": 1}', "completed"), ("{", "incomplete")])
def test_unreadable_call_is_marked_incomplete(
    http: Any, engines: Any, arguments: str, status: str
) -> None:
    engines.script = engines.answer(f'<tool_call>{{"name": "g", "arguments": {arguments}')
    (item,) = respond(http, tools=[G])["output"]
    assert (item["type"], item["status"]) == ("function_call", status)


def test_compacted_conversation_continues_with_summary(http: Any, engines: Any) -> None:
    engines.script = engines.answer("They greeted.")
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    body = {"model": "tiny", "input": items, "tools": [G], "instructions": "be brief"}
    answer = http.post("/v1/responses/compact", body)
    assert answer.status_code == 200, answer.text
    compacted = answer.json()
    assert "Summarize the conversation" in prompt_of(engines)
    assert "<tools>" not in prompt_of(engines)
    assert (compacted["object"], compacted["usage"]["output_tokens"] > 1) == (
        "response.compaction", True
    )  # fmt: skip
    user, summary = compacted["output"]
    assert (user["role"], user["content"][0]["text"]) == ("user", "hi")
    assert summary["type"] == "compaction"
    respond(http, input=[*compacted["output"], {"role": "user", "content": "go on"}])
    assert prompt_of(engines) == (
        "<|user|>hi<|end|><|user|>A summary of the conversation so far:\nThey greeted.<|end|>"
        "<|user|>go on<|end|><|assistant|>"
    )


def test_tools_of_all_items_are_bounded_in_total_by_name(
    http: Any,
) -> None:
    found = [
        {"type": "additional_tools", "tools": [{**G, "name": f"f{item}_{n}"} for n in range(100)]}
        for item in range(11)
    ]
    answer = http.post("/v1/responses", {"model": "tiny", "input": found})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[10].tools"
    spaces = [{**AGENTS, "name": f"n{item}", "tools": [G] * 600} for item in range(2)]
    answer = http.post("/v1/responses", {"model": "tiny", "input": "hi", "tools": spaces})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def allowing(number: int) -> schema.ResponsesRequest:
    """A request whose items repeat all of its tools, of which it allows each."""
    tools = [{**G, "name": f"f{index}"} for index in range(number)]
    items = [{"type": "additional_tools", "tools": [tool]} for tool in tools]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    body = {"input": items, "tools": tools, "tool_choice": choice}
    return schema.ResponsesRequest.model_validate(body)


def test_tool_choice_takes_linear_time() -> None:
    half, whole = allowing(400), allowing(800)

    def choose(request: schema.ResponsesRequest) -> None:
        assert isinstance(request.tool_choice, schema.AllowedToolsChoice)
        assert chosen(request.tool_choice, request, offered_tools(request, 0)) != "none"

    grows_no_faster_than_input(lambda: choose(half), lambda: choose(whole))
