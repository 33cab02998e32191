"""Requests from public bug reports that similar servers rejected or answered incorrectly."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.config import FrontEndConfig
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ServedTokenizer
from tests.server.answer.test_quoted_lark import PATCH
from tests.server.conftest import prompt_of, tiny, tokenizer_with

STRICT = (Path(__file__).parents[2] / "clients" / "strict.jinja").read_text(encoding="utf-8")
SAY_HI = {"role": "user", "content": "Say hi."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NONE = {"type": "object", "properties": {}}
EMPTY: list[Any] = [None, "", []]
EXEC = {"type": "custom", "name": "exec"}
G = {"type": "function", "name": "g", "parameters": NONE}


def after_call(arguments: Any) -> list[Any]:
    """Return a conversation in which the model has called a tool."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return [
        SAY_HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "and?"},
    ]


def said(role: str, text: str) -> dict[str, Any]:
    """Return a message in the form that Codex sends."""
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def beta(*blocks: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return a request for a message whose last turn holds some blocks."""
    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [*blocks]}
    turns = [
        SAY_HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return "/v1/messages?beta=true", {"max_tokens": 8, "messages": turns, **fields}


def moved(*blocks: Any) -> tuple[str, dict[str, Any]]:
    """Return a request for a message after an answer of another server."""
    turns = [SAY_HI, {"role": "assistant", "content": [*blocks]}, SAY_HI]
    return "/v1/messages", {"max_tokens": 8, "messages": turns}


CASES: list[tuple[str, tuple[str, dict[str, Any]], str]] = [
    ("vllm-project/vllm#44000",
     ("/v1/messages?beta=true",
      {"max_tokens": 8, "messages": [SAY_HI, {"role": "system", "content": "note"}]}),
     "<|user|>Say hi.\n\nnote<|end|>"),
    ("anthropics/claude-code#21612",
     ("/v1/messages?beta=true",
      {"max_tokens": 8, "messages": [SAY_HI], "context_management":
       {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
     "<|user|>Say hi.<|end|>"),
    ("an image that a tool read", beta({"type": "image", "source": {"type": "base64"}}),
     "[image omitted: this model reads text]"),
    ("a tool that a search found", beta({"type": "tool_reference", "tool_name": "Bash"}),
     "The tool Bash is available."),
    ("a PDF that a tool read", beta({"type": "document", "source": {"type": "base64"}}),
     "[document omitted: only plain-text documents are supported]"),
    ("a text file", beta({"type": "document", "source": {"type": "text", "data": "abc"}}), "abc"),
    ("passages", beta({"type": "search_result", "source": "u", "title": "t",
                       "content": [{"type": "text", "text": "p"}]}), "t\nu\np"),
    ("stop sequences", beta(stop_sequences=[f"<{i}>" for i in range(14)]), ""),
    ("hosted tools beside functions",
     beta(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
                 {"name": "g", "input_schema": NONE}]), '"name": "g"'),
    ("ikawrakow/ik_llama.cpp#1964",
     ("/v1/responses", {"input": "hi", "max_output_tokens": 8, "tool_choice": "auto", "tools":
      [G, {"type": "namespace", "name": "multi_agent_v1", "description": "d", "tools": [G]}]}),
     '"name": "multi_agent_v1__g"'),
    ("ikawrakow/ik_llama.cpp#1964, web search",
     ("/v1/responses", {"input": "hi", "max_output_tokens": 8, "tool_choice": "auto", "tools":
      [G, {"type": "web_search", "external_web_access": False}]}), '"name": "g"'),
    ("apply_patch",
     ("/v1/responses", {"input": "hi", "max_output_tokens": 8, "tools":
      [{"type": "custom", "name": "apply_patch", "description": "d", "format":
        {"type": "grammar", "syntax": "lark", "definition": PATCH}}]}), '"name": "apply_patch"'),
    ("vllm-project/vllm#42407",
     ("/v1/responses", {"max_output_tokens": 1, "input":
      [said("developer", "a"), said("developer", "b"), said("user", "c")]}),
     "<|system|>a\n\nb<|end|><|user|>c<|end|>"),
    ("two system messages",
     ("/v1/chat/completions", {"max_tokens": 1, "messages":
      [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, SAY_HI]}),
     "<|system|>a\n\nb<|end|><|user|>Say hi.<|end|>"),
    *[(f"vllm-project/vllm#43851: {arguments!r}",
       ("/v1/chat/completions",
        {"max_tokens": 8, "tools": [WEATHER], "messages": after_call(arguments)}),
       '{"name": "get_weather", "arguments": {}}')
      for arguments in ("null", "", "  ", "[]", "{}", None)],
    ("vllm-project/vllm#48922",
     ("/v1/chat/completions", {"max_tokens": 8, "tools": [WEATHER],
      "messages": after_call('{"city": "a\\_b"}')}),
     '{"name": "get_weather", "arguments": {"city": "a\\_b"}}'),
    ("continuedev/continue#1371",
     ("/v1/chat/completions", {"max_tokens": 8, "messages": [SAY_HI],
      "stop": ["a1", "b1", "c1", "d1", "e1"]}), ""),
    ("nothing to choose from",
     ("/v1/chat/completions", {"max_tokens": 8, "messages": [SAY_HI], "tools": None,
      "tool_choice": "auto"}), ""),
    ("an empty list of tools",
     ("/v1/chat/completions", {"max_tokens": 8, "messages": [SAY_HI], "tools": []}), ""),
    ("300 tools",
     ("/v1/chat/completions", {"max_tokens": 8, "messages": [SAY_HI], "tools":
      [{"type": "function", "function": {"name": f"f{i}"}} for i in range(300)]}), '"f299"'),
    ("mxyhi/token_proxy#307",
     ("/v1/responses", {"max_output_tokens": 1, "input":
      [{"type": "additional_tools", "role": "developer", "tools":
        [{"type": "namespace", "name": "functions", "tools": [EXEC]}]},
       said("user", "c")]}), '"name": "functions__exec"'),
    ("ggml-org/llama.cpp#23465",
     ("/v1/responses", {"max_output_tokens": 1, "input":
      [said("user", "c"),
       {"type": "custom_tool_call", "call_id": "c1", "name": "exec", "input": "x"},
       {"type": "custom_tool_call_output", "call_id": "c1", "output":
        [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}]}]}),
     "a\n[input_image omitted: this model reads text]"),
    ("anomalyco/opencode#42613",
     ("/v1/responses", {"max_output_tokens": 1, "input":
      [{"role": "user", "content": "hi"},
       {"type": "message", "role": "assistant", "content":
        [{"type": "output_text", "text": "Hello!"}]},
       {"role": "user", "content": "bye"}]}), "<|assistant|>Hello!<|end|><|user|>bye<|end|>"),
    *[(f"tashfeenahmed/freellmapi#165: {content!r}",
       ("/v1/chat/completions", {"max_tokens": 1, "messages":
        [SAY_HI, {"role": "assistant", "content": content}, SAY_HI]}),
       "<|assistant|><|end|><|user|>Say hi.")
      for content in EMPTY],
    ("TQZHR/grok2api#41",
     ("/v1/chat/completions", {"max_tokens": 1, "tools": [WEATHER], "messages":
      [*after_call("{}")[:2], {"role": "tool", "tool_call_id": "c1", "content": None}]}),
     "<tool_response></tool_response>"),
    ("anomalyco/opencode#48637",
     ("/v1/messages", {"max_tokens": 8, "thinking":
      {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}},
      "messages": [SAY_HI, {"role": "assistant", "content":
       [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Hi."}]},
       SAY_HI]}), "<|assistant|>Hi.<|end|>"),
    ("Wei-Shaw/sub2api#3677",
     moved({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
           {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
           {"type": "text", "text": "Found."}), "<|assistant|>Found.<|end|>"),
    ("tools of an MCP server that another server called",
     moved({"type": "mcp_tool_use", "id": "s", "name": "n", "server_name": "m", "input": {}},
           {"type": "mcp_tool_result", "tool_use_id": "s", "content": []},
           {"type": "text", "text": "Found."}), "<|assistant|>Found.<|end|>"),
    ("a conversation that was summarized",
     moved({"type": "compaction", "content": "They said hi."}, {"type": "text", "text": "Bye."}),
     "<|assistant|>They said hi.\nBye.<|end|>"),
    ("KarpelesLab/teamclaude#451",
     ("/v1/messages?beta=true",
      {"max_tokens": 8, "tools": [{"name": "g", "input_schema": NONE}], "messages":
       [SAY_HI, {"role": "system", "content":
                 [{"type": "text", "text": "note"},
                  {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "g"}}]}]}),
     "<|user|>Say hi.\n\nnote\nThe tool g is available.<|end|>"),
    ("items of tools that only OpenAI offers",
     ("/v1/responses", {"max_output_tokens": 1, "input":
      [said("user", "a"),
       {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
       {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
       {"type": "shell_call_output", "call_id": "c", "output": []},
       {"type": "apply_patch_call", "call_id": "d", "operation": {"type": "delete_file"}},
       {"type": "apply_patch_call_output", "call_id": "d", "status": "completed"},
       said("user", "b")]}), "<|user|>a<|end|><|user|>b<|end|>"),
    ("openai/codex#10635",
     ("/v1/responses", {"input": "hi", "max_output_tokens": 8, "tools":
      [G, {"type": "web_search"}, {"type": "image_generation", "output_format": "png"}]}),
     '"name": "g"'),
    ("ogx-ai/ogx#4617",
     ("/v1/responses", {"max_output_tokens": 8, "input":
      [{"type": "message", "role": "user", "content": "hi"}],
      "tools": [{**G, "strict": None, "description": None}]}), '"name": "g"'),
    ("lmstudio-ai/lmstudio-bug-tracker#2203",
     ("/v1/chat/completions", {"max_tokens": 8, "messages": [SAY_HI], "tools":
      [{"type": "function", "function": {"name": "submit", "parameters": {"type": "object"}}}]}),
     '"name": "submit"'),
    ("TencentCloud/TencentDB-Agent-Memory#1313",
     ("/v1/chat/completions", {"max_tokens": 8, "messages":
      [{"role": "user", "content": [{"type": "text", "text": "Say hi."}]},
       after_call("{}")[1],
       {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]}]}),
     "<tool_response>sunny</tool_response>"),
    ("vllm-project/vllm#13978",
     ("/v1/chat/completions", {"max_tokens": 8, "messages":
      [SAY_HI, {"role": "assistant", "content": "Hi.", "tool_calls": []}, SAY_HI]}),
     "<|assistant|>Hi.<|end|>"),
    ("Mangi-11/Eta#59",
     ("/v1/chat/completions", {"max_tokens": 8, "messages":
      [{"role": "system", "content": "a"}, SAY_HI, {"role": "assistant", "content": "Hi."},
       {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]}),
     "<|system|>a<|end|><|user|>Say hi.<|end|><|assistant|>Hi.<|end|><|user|>b\n\nc<|end|>"),
    ("anthropics/claude-code#52057",
     moved({"type": "text", "text": "", "cache_control": {"type": "ephemeral"}},
           {"type": "text", "text": "Hi."}), "Hi.<|end|>"),
    ("router-for-me/CLIProxyAPI#512",
     moved({"type": "thinking", "thinking": "hm", "signature": "s",
            "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Hi."}),
     "<|assistant|>Hi.<|end|>"),
    ("anthropics/claude-code#51985",
     ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 8},
      "messages": [SAY_HI, {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
                   SAY_HI]}), "<|assistant|>Hi.<|end|>"),
    ("anthropics/claude-code#2663",
     ("/v1/messages", {"max_tokens": 8, "messages":
      [SAY_HI, {"role": "assistant", "content": []}, SAY_HI]}), "<|user|>Say hi.<|end|>"),
    ("anthropics/claude-code#1571",
     moved({"type": "tool_use", "id": "t", "name": "g", "input": {}}), '"name": "g"'),
    ("anthropics/claude-code#12692",
     ("/v1/messages", {"max_tokens": 8, "messages":
      [SAY_HI, {"role": "user", "content":
       [{"type": "tool_result", "tool_use_id": "gone", "content": "sunny"}]}]}),
     "<tool_response>sunny</tool_response>"),
    *[(f"{report}: {next(iter(schema))}",
       ("/v1/chat/completions", {"max_tokens": 8, "messages": [SAY_HI], "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters":
         {"type": "object", "properties": {"a": schema}, "required": ["a"],
          "additionalProperties": False}}}]}), '"name": "f"')
      for report, schema in (
          ("anomalyco/opencode#43371", {"exclusiveMinimum": 0, "type": "integer", "maximum": 2000}),
          ("i-am-bee/beeai-framework#1215",
           {"minItems": 1, "type": "array", "items": {"type": "string"}, "maxItems": 3}),
          ("vllm-project/vllm#16880",
           {"minItems": 1, "type": "array", "items": {"type": "object"}}),
          ("withcatai/node-llama-cpp#388",
           {"prefixItems": [{"type": "string"}, {"type": "integer"}], "type": "array",
            "items": False}),
          ("BerriAI/litellm#34319", {"multipleOf": 5, "type": "integer"}),
      )],
    ("ikawrakow/ik_llama.cpp#1964, a probe",
     ("/v1/responses", {"input": [], "max_output_tokens": 1}), "<|user|><|end|>"),
]  # fmt: skip


@pytest.fixture
def config() -> FrontEndConfig:
    return tiny()


@pytest.fixture
def tokenizer(backend: Tokenizer) -> ServedTokenizer:
    return tokenizer_with(backend, STRICT)


@pytest.mark.parametrize(
    ("request_", "shown"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_request_is_answered(
    http: Any, engines: Any, request_: tuple[str, dict[str, Any]], shown: str
) -> None:
    engines.context = 1 << 16
    path, body = request_
    answer = http.post(path, {"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    assert shown in prompt_of(engines)
    if path.startswith("/v1/messages"):
        counted = {name: value for name, value in body.items()
                   if name not in ("max_tokens", "stop_sequences")}  # fmt: skip
        answer = http.post("/v1/messages/count_tokens?beta=true", {"model": "tiny", **counted})
        assert answer.json() == {"input_tokens": len(engines.streams[-1].prompt_token_ids)}


def test_withdrawn_tool_cannot_be_called(http: Any, engines: Any) -> None:
    tools = [{"name": name, "input_schema": NONE} for name in ("f", "g")]
    change = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    turns = [SAY_HI, {"role": "system", "content": [change]}]
    body = {"model": "tiny", "max_tokens": 8, "messages": turns, "tools": tools}
    assert http.post("/v1/messages", body).status_code == 200
    prompt = prompt_of(engines)
    assert '"name": "f"' not in prompt
    assert '"name": "g"' in prompt
    assert "The tool f is no longer available." in prompt


def test_compaction_of_other_server_is_refused(http: Any) -> None:
    path, body = moved({"type": "compaction", "content": None, "encrypted_content": "x"})
    answer = http.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400
    assert "messages[1].content[0]: a conversation that another" in answer.text


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ({"type": "disabled"}, "False False "),
        ({"type": "enabled", "clear_thinking": False}, "True True False"),
    ],
)
def test_reasoning_switches_of_glm_and_kimi_apis_work(
    http: Any, engines: Any, sent: dict[str, Any], shown: str
) -> None:
    """vllm-project/vllm#24039, anomalyco/opencode#25001."""
    template = "{{ enable_thinking }} {{ thinking }} {{ clear_thinking }}{{ messages[0].content }}"
    engines.tokenizer.chat_template = ChatTemplate(template, {})
    http.chat(messages=[SAY_HI], thinking=sent)
    assert prompt_of(engines) == f"{shown}Say hi."


def test_streamed_malformed_call_is_accepted_as_input(http: Any, engines: Any) -> None:
    wrong = '{"name": "get_weather", "arguments": {\'city\': \'Oslo\'}}'
    engines.script = engines.answer(f"<tool_call>\n{wrong}\n</tool_call>")
    engines.context = 4096
    asked: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 200}
    events = http.stream("/v1/chat/completions", {"messages": [SAY_HI], **asked})
    arguments = "".join(
        call["function"].get("arguments", "")
        for event in events
        for call in event["choices"][0]["delta"].get("tool_calls", [])
    )
    assert events[-1]["choices"][0]["unreadable_tool_calls"] == [0]
    http.chat(messages=after_call(arguments), **asked)
    whole = http.chat(messages=[SAY_HI], **asked)["choices"][0]
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    assert whole["unreadable_tool_calls"] == [0]
    function = {"name": "get_weather", "input_schema": CITY}
    body = {"model": "tiny", "messages": [SAY_HI], "tools": [function], "max_tokens": 200}
    message = http.post("/v1/messages", body).json()
    [block] = message["content"]
    assert (block["input"], message["unreadable_tool_use"]) == ({}, [block["id"]])
    text = http.post("/v1/messages", {**body, "stream": True}).text
    assert '"stop_reason":"tool_use","stop_sequence":null,"unreadable_tool_use":["call_' in text


def test_an_image_of_the_user_is_refused_by_name(http: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": [image]}]}
    answer = http.post("/v1/messages", body)
    assert answer.status_code == 400
    assert "messages[0].content[0]: this model reads text" in answer.json()["error"]["message"]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [url]}]}
    answer = http.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"
    assert "this model reads text" in answer.json()["error"]["message"]


GPT_OSS = (
    "{% for message in messages %}{% if message.tool_calls %}"
    "{% if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "[{{ message.content or message.thinking }}]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(("content", "shown"), [(None, "[hm]"), ("", "[hm]"), ("Look.", "[Look.]")])
def test_reasoning_before_a_call_is_shown_to_gpt_oss(
    http: Any, engines: Any, content: str | None, shown: str
) -> None:
    """ggml-org/llama.cpp#17040, ggml-org/llama.cpp#19703."""
    engines.tokenizer.chat_template = ChatTemplate(GPT_OSS, {})
    turns = after_call("{}")
    turns[1] |= {"content": content, "reasoning_content": "hm"}
    http.chat(messages=turns, tools=[WEATHER])
    assert prompt_of(engines) == shown


FAILS_ON_TEXT = (
    "{% for message in messages %}{% for call in message.tool_calls %}"
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}"
    "!{% endfor %}{{ message.role }}{% endfor %}"
)


def test_unrenderable_arguments_are_replaced_by_empty_ones(http: Any, engines: Any) -> None:
    engines.tokenizer.chat_template = ChatTemplate(FAILS_ON_TEXT, {})
    http.chat(messages=after_call("no JSON"))
    prompt = prompt_of(engines)
    assert prompt == "user!assistanttooluser"
