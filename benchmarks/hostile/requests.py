"""Well-formed requests that are as costly as their fields, or the size of a body, allow."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.hostile.operations import VALID_INPUTS
from server.limits import (
    MAX_INPUT_TOKENS,
    MAX_JSON_CONTAINERS,
    MAX_JSON_VALUES,
    MAX_MESSAGES,
    MAX_PROMPTS,
)

_WORD = "ROMEO:"
_SIZE = 4 * 2**20
"""Size of a body in bytes, the server's limit."""


class Request(NamedTuple):
    """One request, named after what it is meant to exhaust."""

    name: str
    path: str
    body: bytes


def _completion(name: str, **fields: Any) -> Request:
    body = {"prompt": _WORD, "max_tokens": 64, "ignore_eos": True, **fields}
    return Request(name, "/v1/completions", json.dumps(body).encode())


def _chat(name: str, **fields: Any) -> Request:
    messages = [{"role": "user", "content": "What news?"}]
    body = {"messages": messages, "max_tokens": 16, **fields}
    return Request(name, "/v1/chat/completions", json.dumps(body).encode())


def _response(name: str, **fields: Any) -> Request:
    body = {"input": _WORD, "max_output_tokens": 1, **fields}
    return Request(f"/v1/responses {name}", "/v1/responses", json.dumps(body).encode())


def _nested(levels: int, opening: str, closing: str, inside: str = "") -> str:
    return opening * levels + inside + closing * levels


def chained_rules(count: int) -> str:
    """Return a Lark grammar of rules that refer to one another, ending in a costly terminal."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return f"start: r0\n{rules}\nr{count}: /(a|b|ab|ba)*x(a|b){{200}}/"


def costly_requests() -> list[Request]:
    """Return requests whose cost comes from their parameters, not from their size."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    deep = json.loads(_nested(300, '{"type": "array", "items": ', "}", '{"type": "null"}'))
    return [
        *_of_sampling(),
        *_of_forms(deep),
        _chat("tool arguments nested deeply", messages=_call_turns(_nested(5000, "[", "]"))),
        _chat("128 tools with deep schemas", tools=[
            {"type": "function", "function": {"name": f"f{i}", "parameters": deep}}
            for i in range(128)
        ], tool_choice="required"),
        _chat("tools and a contradictory choice", tools=[tool],
              tool_choice={"type": "function", "function": {"name": "g"}}),
        _chat("template arguments without end", chat_template_kwargs={"messages": "x" * 10**6}),
        _chat("2,000 turns", messages=[{"role": "user", "content": "a"}] * 2000),
        _chat("thinking with many template arguments", thinking={"type": "enabled"},
              chat_template_kwargs={f"k{i}": "x" * 400 for i in range(4000)}),
        *_of_tools(),
        *_of_blocks(),
    ]  # fmt: skip


def _of_tools() -> list[Request]:
    tools = [{"type": "function", "name": f"f{i}"} for i in range(14_000)]
    named = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1024)]
    every = {"type": "allowed_tools", "mode": "auto"}
    return [
        _response("tools added by 1,000 items", input=[
            {"type": "additional_tools", "tools": tools[i * 14 : i * 14 + 14]} for i in range(1000)
        ]),
        _response("1,024 allowed tools", tools=tools[:1024],
                  tool_choice={**every, "tools": tools[:1024]}),
        _response("1,024 allowed of 14,000 tools", tool_choice={**every, "tools": tools[-1024:]},
                  tools=[{"type": "namespace", "name": f"n{i}", "tools": tools[i::14][:1000]}
                         for i in range(14)]),
        _response("hosted items", input=[{"type": "mcp_call", "x": [{}] * 14}] * 2047),
        _response("2,000 calls in a row", input=[
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 900}
        ] * 2000),
        _chat("1,024 allowed tools of a chat", tools=named,
              tool_choice={"type": "allowed_tools", "allowed_tools": {
                  "mode": "auto", "tools": named}}),
    ]  # fmt: skip


def _of_blocks() -> list[Request]:
    """Turns of /v1/messages that are full of one kind of block."""
    text = {"type": "text", "text": "a"}
    image = {"type": "image", "source": {"type": "base64"}}
    found = {"type": "tool_reference", "tool_name": "a" * 100}
    reference = {"type": "tool_reference", "name": "a" * 100}
    blocks: dict[str, tuple[str, dict[str, Any]]] = {
        "tool additions": ("system", {"type": "tool_addition", "tool": reference}),
        "tool removals": ("system", {"type": "tool_removal", "tool": reference}),
        "compactions": ("assistant", {"type": "compaction", "content": "a" * 90}),
        "opaque compactions": ("assistant", {"type": "compaction", "encrypted_content": "a"}),
        "hosted calls": ("assistant", {"type": "server_tool_use", "input": {}}),
        "hosted results": ("user", {"type": "web_search_tool_result", "content": [0]}),
        "images": ("user", image),
        "documents": ("user", {"type": "document", "source": {"type": "text", "data": "a"}}),
        "found tools": ("user", {"type": "tool_result", "tool_use_id": "c", "content": [found]}),
        "texts of results": (
            "user", {"type": "tool_result", "tool_use_id": "c", "content": [text]},
        ),
        "images of results": (
            "user", {"type": "tool_result", "tool_use_id": "c", "content": [image]},
        ),
    }  # fmt: skip
    return [
        Request(f"/v1/messages {name}", "/v1/messages", json.dumps(
            {"model": "swell-shakespeare", "max_tokens": 1,
             "messages": [{"role": role, "content": [block] * 1000}] * 13}
        ).encode())
        for name, (role, block) in blocks.items()
    ]  # fmt: skip


NESTED_QUANTIFIERS = ["^(a+)+$", "^(a|a)*$", "(.*a){30}", "^(a?){60}a{60}$", "((a|b)*c)*d"]


def pattern_requests() -> list[Request]:
    """Return patterns that make backtracking engines hang, in every field that accepts one."""
    found = []
    for pattern in NESTED_QUANTIFIERS:
        key = "a" * 60 + "!"
        of_keys: dict[str, Any] = {
            "properties": {key: {"type": "integer"}},
            "patternProperties": {pattern: {"type": "integer"}},
        }
        for name, schema in (("key", of_keys), ("text", {"type": "string", "pattern": pattern})):
            lark = f"start: %json {json.dumps(schema)}"
            format = {"type": "json_schema", "name": "x", "schema": schema}
            tool = {"name": "f", "parameters": schema, "strict": True}
            tools = [{"type": "function", "function": tool}]
            named = f"{pattern} of a {name}"
            found += [
                _completion(f"json: {named}", structured_outputs={"json": schema}),
                _completion(f"%json: {named}", structured_outputs={"grammar": lark}),
                _chat(
                    f"response_format: {named}",
                    response_format={"type": "json_schema", "json_schema": format},
                ),
                _chat(f"strict tool: {named}", tools=tools),
                _chat(f"required tool: {named}", tools=tools, tool_choice="required"),
                _response(f"text.format: {named}", text={"format": format}, max_output_tokens=16),
            ]
        bare = pattern.removeprefix("^").removesuffix("$")
        form = {"type": "grammar", "syntax": "regex", "definition": bare}
        custom = {"type": "custom", "name": "f", "format": form}
        found += [
            _completion(f"regex: {pattern}", structured_outputs={"regex": bare}),
            _completion(f"terminal: {pattern}", structured_outputs={"grammar": f"start: /{bare}/"}),
            _completion(f"whitespace: {pattern}",
                        structured_outputs={"json": {}, "whitespace_pattern": bare}),
            _completion(f"tag: {pattern}", structured_outputs={
                "structural_tag": {"format": {"type": "regex", "pattern": bare}}}),
            _response(f"custom tool: {pattern}", tools=[custom], max_output_tokens=16),
        ]  # fmt: skip
    return found


def grammar_requests() -> list[Request]:
    """Return grammars that are costly to parse, check or follow."""
    parts = {
        "optional letters": '("a")? ',
        "repeated letters": '("a")* ',
        "quotes that are never closed": '\\"',
        "schemas that never end": "%json {",
        "rules of one letter": "a\n",
        "letters": "a",
    }
    found = [
        _completion(
            f"{size // 1000} KB of {name}",
            n=64,
            structured_outputs={"grammar": f"start: {part * (size // len(part))}"},
        )
        for name, part in parts.items()
        for size in (3_000, 13_000, 69_000, 120_000)
    ]
    patterns = {f"^k{i}_[a-z]+$": {"type": "integer"} for i in range(64)}
    return [
        *found,
        _completion("64 patterns of keys", structured_outputs={
            "json": {"patternProperties": patterns, "properties": {"k1_a": {}, "other": {}}}}),
        _completion("2,000 optional properties", n=64, structured_outputs={
            "json": {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}}),
    ]  # fmt: skip


def long_requests() -> dict[str, dict[str, Any]]:
    """Return completions that take an engine seconds, by their costly parameter."""
    prompt = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    body = {"prompt": _WORD, "max_tokens": 200, "ignore_eos": True}
    return {
        "127 choices": {**body, "n": 127},
        "8 choices": {**body, "n": 8},
        "2,048 prompts": {**body, "prompt": ["a"] * 2048, "max_tokens": 1},
        "512 prompts of a line": {
            **body, "prompt": [f"{index} {prompt}" for index in range(512)], "max_tokens": 1,
        },
        "32 beams of a long prompt": {
            **body, "prompt": [5] * 900, "n": 32, "use_beam_search": True, "max_tokens": 64,
        },
        "8 choices in a costly grammar": {
            **body, "n": 8,
            "structured_outputs": {"grammar": "start: /(.*a.*){40}/ /(.*b.*){40}/"},
        },
    }  # fmt: skip


def _of_sampling() -> list[Request]:
    return [
        _completion("best_of 2**62", best_of=2**62),
        _completion("best_of 10**15", best_of=10**15),
        _completion("n 128 with all scores", n=128, logprobs=20, prompt_logprobs=20, echo=True),
        _completion("2,048 prompts", prompt=["a"] * 2048, max_tokens=1),
        _completion("2,048 prompts, best_of 128", prompt=["a"] * 2048, best_of=128),
        _completion("one long bad word", bad_words=["a" * (2 << 20)]),
        _completion("1,024 bad words in 127 choices",
                    bad_words=[f"w{i} x{i} y{i}" for i in range(1024)], n=127, max_tokens=200),
        _completion("a million stop tokens", stop_token_ids=[7] * 1_000_000, n=128),
        _completion("a bias for every token", n=128,
                    logit_bias={str(i): 1.0 for i in range(1000)}),
        _completion("many allowed tokens", n=128, allowed_token_ids=list(range(1000)) * 100),
        _completion("long stop strings", stop=["a" * 100_000 for _ in range(16)], n=64),
        _completion("the longest text", prompt="a " * 1_000_000),
        _completion("the longest text, cut", prompt="a " * 1_000_000, truncate_prompt_tokens=10),
        _completion("one word of a megabyte", prompt="a" * 2_000_000),
        _completion("token ids without end", prompt=[5] * 600_000),
        _completion("32 beams of a long prompt", use_beam_search=True, n=32, prompt=[5] * 900,
                    max_tokens=8),
        _completion("more beams than are sent", use_beam_search=True, n=32,
                    prompt=[[5] * 900] * 3),
        _completion("beams with a thousand ends", use_beam_search=True, n=32,
                    stop_token_ids=list(range(1000))),
        _completion("a rank that cannot be", priority=-(2**31)),
    ]  # fmt: skip


def _of_forms(deep: dict[str, Any]) -> list[Request]:
    properties = {f"p{i}": {"type": "string", "pattern": "^(a|b|ab)*$"} for i in range(2000)}
    references = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {}}

    def held(name: str, **form: Any) -> Request:
        return _completion(name, structured_outputs=form, n=8)

    return [
        held("a chain of 7,000 rules", grammar=chained_rules(7000)),
        held("a chain of 500 rules", grammar=chained_rules(500)),
        held("a rule within itself", grammar="start: a\na: a a | b\nb: a"),
        held("exploding terminals", grammar="start: /(.*a.*){40}/ /(.*b.*){40}/"),
        held("an expression with repetitions of repetitions", regex="((a{100}){100}){100}"),
        held("an expression nested deeply", regex=_nested(20_000, "(", ")", "a")),
        held("an exploding expression", regex="(a|b)*a(a|b){60}"),
        held("a schema nested deeply", json=deep),
        held("a schema with 2,000 patterns", json={"type": "object", "properties": properties,
                                                    "required": list(properties)}),
        held("a chain of references", json={"$ref": "#/$defs/d0", "$defs": references}),
        held("10,000 choices", choice=[f"choice {i}" for i in range(10_000)]),
        held("a form that contradicts the tokens", regex="[0-9]{5}"),
        _completion("a form without its tokens", structured_outputs={"regex": "[0-9]{5}"},
                    allowed_token_ids=[5]),
        held("unbounded repetition of digits", regex="[0-9]{1,100000}"),
    ]  # fmt: skip


def _call_turns(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]


# -- vectors and scores ----------------------------------------------------------------------------


def costly_inputs() -> Iterator[Request]:
    """Yield ordinary requests, and those at or above the limits of number and length."""
    for path, body in VALID_INPUTS.items():
        yield Request(f"{path} as usual", path, json.dumps(body).encode())
    share = _SIZE // MAX_PROMPTS - 16
    tokens = MAX_INPUT_TOKENS // MAX_PROMPTS
    bodies: dict[str, dict[str, Any]] = {
        "2,048 words": {"input": ["a"] * MAX_PROMPTS},
        "2,048 words in base64": {"input": ["a"] * MAX_PROMPTS, "encoding_format": "base64"},
        "2,049 words": {"input": ["a"] * (MAX_PROMPTS + 1)},
        "2,048 texts": {"input": ["ab " * (share // 3)] * MAX_PROMPTS},
        "2,048 texts cut": {
            "input": ["ab " * (share // 3)] * MAX_PROMPTS,
            "truncate_prompt_tokens": 1,
        },
        "2,048 lists of token ids": {"input": [[5] * (tokens // 4)] * MAX_PROMPTS},
        "one text": {"input": "qxzj " * (_SIZE // 5 - 20)},
        "one text cut": {"input": "qxzj " * (_SIZE // 5 - 20), "truncate_prompt_tokens": -1},
        "one text cut at its end": {
            "input": "a" * (_SIZE - 100), "truncate_prompt_tokens": -1, "truncation_side": "left",
        },
        "token ids": {"input": [300] * (MAX_JSON_VALUES - 10)},
        "wrong token ids": {"input": [-1] * (MAX_JSON_VALUES - 10)},
        "empty lists": {"input": [[]] * 30_000},
        "texts and numbers": {"input": ["a"] * 2000 + [1]},
        "dimensions": {"input": ["a"] * MAX_PROMPTS, "dimensions": 10**30},
    }  # fmt: skip
    for name, body in bodies.items():
        yield Request(f"/v1/embeddings {name}", "/v1/embeddings", json.dumps(body).encode())
    many = ["ab"] * (MAX_PROMPTS - 1)
    at_most: dict[str, dict[str, Any]] = {
        "/score": {"text_1": "ab", "text_2": many},
        "/v1/score": {"text_1": ["ab"] * 1024, "text_2": ["ba " * 600] * 1024},
        "/rerank": {"query": "ab", "documents": many},
        "/v2/rerank": {"query": "a " * 10**6, "documents": [{"text": "b"}] * 2047},
        "/pooling": {"input": [[1]] * MAX_PROMPTS, "task": "token_embed"},
    }
    for path, body in at_most.items():
        yield Request(f"{path} at its most", path, json.dumps(body).encode())


# -- bodies of maximum size, cheap to send and expensive to hold -----------------------------------

_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/conversations",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
)

_MESSAGE = b'{"role":"user","content":""},'


def large_requests() -> Iterator[Request]:
    """Yield each body for every path, and texts too long for any model to be tokenized."""
    for name, body in _bodies().items():
        for path in _PATHS:
            yield Request(f"{path} {name}", path, body)
    for name, piece in _TEXTS.items():
        yield Request(f"/tokenize {name}", "/tokenize", _filled(b'{"prompt":"', piece, b'"}'))


def _filled(start: bytes, piece: bytes, end: bytes, count: int = _SIZE) -> bytes:
    """Return a body of `count` pieces, or as many as the size limit allows."""
    count = min(count, (_SIZE - len(start) - len(end)) // len(piece) - 1)
    return start + piece * count + piece.rstrip(b",") + end


def _bodies() -> dict[str, bytes]:
    ids, nested = MAX_JSON_VALUES - 10, MAX_JSON_CONTAINERS - 10
    return {
        "zeros as messages": _filled(b'{"messages":[', b"0,", b"]}"),
        "zeros as input": _filled(b'{"input":[', b"0,", b"]}"),
        "token ids": _filled(b'{"prompt":[', b"300,", b"]}", ids),
        "token ids to decode": _filled(b'{"tokens":[', b"300,", b"]}", ids),
        "wrong token ids": _filled(b'{"prompt":[', b"-1,", b"]}", ids),
        "lists of token ids": _filled(b'{"prompt":[', b"[1],", b"]}", 2000),
        "messages": _filled(b'{"messages":[', _MESSAGE, b"]}", MAX_MESSAGES - 1),
        "too many messages": _filled(b'{"messages":[', _MESSAGE, b"]}"),
        "unknown objects": _filled(b'{"prompt":"x","y":[', b"{},", b"]}", nested),
        "unknown texts": _filled(b'{"prompt":"x","y":[', b'"a,b",', b"]}", MAX_JSON_VALUES // 2),
        "nested": b'{"messages":' + b"[" * (_SIZE - 100),
        "template arguments": _filled(
            b'{"messages":[{"role":"user","content":""}],"chat_template_kwargs":{"a":[',
            b'{"":0},', b"]}}", nested,
        ),
    }  # fmt: skip


_TEXTS = {
    "backslashes": b"\\\\",
    "words": b"qxzj ",
    "ideographs": "語".encode(),
    "one word": b"a",
    "blanks": b" ",
}


REQUESTS: dict[str, Callable[[], Iterable[Request]]] = {
    "costly": costly_requests,
    "patterns": pattern_requests,
    "grammars": grammar_requests,
    "inputs": costly_inputs,
    "large": large_requests,
}
"""By what is costly; `inputs` are for pooling models."""
