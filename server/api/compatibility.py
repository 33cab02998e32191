"""What becomes of each field of a request that clients of such servers send: one table.

Fields that are understood are honoured. Those that would change what a request means and are not
served are refused by name (`server.api.refusals` reads that from here). The rest, which change
nothing that a client could see in an answer, are ignored, as are fields that nobody has heard of.
docs/compatibility.md is written from this table.
"""

from typing import Any, Literal

import msgspec

State = Literal["same", "different", "refused", "ignored"]


class Row(msgspec.Struct, frozen=True):
    """A field; `why` tells what is different, or why it is refused or ignored."""

    state: State
    why: str = ""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, besides null: they are taken of a refused field."""
    example: Any = True
    """A value that is refused."""
    foreign: bool = False
    """Only other endpoints are known to have it."""


Rows = dict[str, Row]


def _same(names: str) -> Rows:
    return {name: Row("same") for name in names.split()}


def _ignored(why: str, names: str) -> Rows:
    return {name: Row("ignored", why) for name in names.split()}


def _refused(why: str, names: str, *neutral: Any) -> Rows:
    example = True not in [value for value in neutral if value is True]
    return {name: Row("refused", why, neutral, example) for name in names.split()}


_LABELS = _ignored(
    "a label for the operator's books", "metadata safety_identifier session_id"
) | _ignored(
    "a hint for caches and queues of other servers; prompts are cached in any case",
    "prompt_cache_key prompt_cache_retention prompt_cache_options service_tier",
)
_MEDIA = "about images and sound, which messages cannot hold"
_NO_MEDIA = _ignored(_MEDIA, "media_io_kwargs mm_processor_kwargs")

_UNSERVED: Rows = {
    **_refused("KV blocks are not handed between servers", "kv_transfer_params"),
    **_refused("there are no encoder caches to hand over", "ec_transfer_params"),
    **_refused("there are no extensions that could read it", "vllm_xargs", {}),
    **_refused("repetition is not looked for", "repetition_detection"),
    **_refused("answers are not marked", "watermarking", False),
    **_refused("there are no custom logits processors", "logits_processors", []),
    **_refused("routed experts are not shown", "routed_experts_prompt_start", 0),
    **_refused(
        "use structured_outputs",
        "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern "
        "structural_tag",
    ),
}

_GENERATION: Rows = {
    **_same(
        "model temperature top_p n stream stream_options stop presence_penalty frequency_penalty "
        "logit_bias seed top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids "
        "allowed_token_ids bad_words skip_special_tokens include_stop_str_in_output cache_salt "
        "request_id return_token_ids return_tokens_as_token_ids truncate_prompt_tokens "
        "truncation_side add_special_tokens"
    ),
    "use_beam_search": Row(
        "different", "as in transformers, with n (or best_of) beams; not with what changes draws"
    ),
    **_same("length_penalty early_stopping"),
    "user": Row("different", "the operator may have requests limited and queued by it"),
    "priority": Row("different", "refused unless the operator allows it"),
    "logprob_token_ids": Row("different", "needs logprobs; not together with echo of prompts"),
    "prompt_logprobs": Row("different", "not in a stream; bounded by --max-logprobs"),
    **_same("response_format structured_outputs"),
    **_LABELS,
    **_NO_MEDIA,
    **_ignored(
        "tokenizers here never add such spaces", "spaces_between_special_tokens"
    ),
    **_ignored("how many tokens a chunk has is the server's choice", "stream_interval"),
    **_ignored("for endpoints that only render prompts", "return_token_offsets return_mm_kwargs"),
    **_UNSERVED,
    **_ignored("there is one way to enforce grammars", "guided_decoding_backend"),
}  # fmt: skip

COMPLETIONS: Rows = {
    **_GENERATION,
    **_same("prompt max_tokens echo"),
    "logprobs": Row("different", "bounded by --max-logprobs"),
    "best_of": Row("different", "must equal n in a stream"),
    "suffix": Row("refused", "infilling is not supported", ("",), "end"),
    **_refused("prompts are texts or token ids", "prompt_embeds"),
    "max_completion_tokens": Row("different", "max_tokens wins; vLLM ignores it here"),
    **_refused("use logprobs", "top_logprobs"),
}

CHAT: Rows = {
    **_GENERATION,
    **_same(
        "messages max_tokens max_completion_tokens logprobs add_generation_prompt "
        "continue_final_message chat_template_kwargs documents tool_choice parallel_tool_calls "
        "include_reasoning reasoning_effort"
    ),
    "top_logprobs": Row("different", "bounded by --max-logprobs"),
    "thinking_token_budget": Row("different", "counts the start tag too; 0 counts as 1"),
    "tools": Row("different", "functions only"),
    "echo": Row("different", "only what an assistant said is repeated"),
    "functions": Row("refused", "use tools instead", (), [{"name": "f"}]),
    "function_call": Row("refused", "use tool_choice instead", (), "auto"),
    "chat_template": Row("different", "only with --trust-request-chat-template; bounded"),
    **_refused("the rendered prompt is not shown; /tokenize and /detokenize do",
               "return_prompt_text", False),
    **_refused("ask for n choices", "best_of", 1),
    **_refused("answers are texts", "audio"),
    **_refused("answers are texts", "modalities", ["text"]),
    **_refused("the server does not search", "web_search_options"),
    **_refused("nothing is moderated", "moderation"),
    **_refused("answers are not kept", "store", False),
    **_refused("use max_completion_tokens", "max_output_tokens"),
    **_ignored("only makes answers come faster", "prediction"),
    "verbosity": Row("different", "passed to the chat template, of which few take notice"),
}  # fmt: skip

_ONE_BY_ONE = "/v1/chat/completions has it, for one conversation"
CHATS: Rows = {
    **CHAT,
    "messages": Row("different", "a list of conversations; vLLM's endpoint"),
    **_refused(_ONE_BY_ONE, "stream use_beam_search echo continue_final_message", False),
    **_refused(_ONE_BY_ONE, "stream_options prompt_logprobs tools tool_choice chat_template"),
    "n": Row("refused", "each conversation has one choice", (1,), 2),
}  # fmt: skip

_NO_BUDGET = _refused("/v1/chat/completions has it; limit max_tokens", "thinking_token_budget", -1)

COMPLETIONS |= _NO_BUDGET

_NO_BEAMS = _refused(
    "/v1/completions and /v1/chat/completions have it", "use_beam_search early_stopping", False
) | _refused("/v1/completions and /v1/chat/completions have it", "length_penalty", 1, 0)

RESPONSES: Rows = {
    **_NO_BEAMS,
    **_NO_BUDGET,
    **_same(
        "model input instructions temperature top_p max_output_tokens tool_choice "
        "parallel_tool_calls text stream stream_options include seed stop presence_penalty "
        "frequency_penalty top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids "
        "logit_bias cache_salt request_id chat_template_kwargs metadata include_reasoning"
    ),
    **_same("structured_outputs"),
    "top_logprobs": Row("different", "bounded by --max-logprobs"),
    "tools": Row("different", "functions and custom tools; of grammars those of the syntax regex"),
    "reasoning": Row("different", "nothing is summarized"),
    "user": _GENERATION["user"],
    "priority": _GENERATION["priority"],
    **_same("previous_response_id conversation"),
    "store": Row("different", "kept as long and as far as the operator says"),
    **_same("background"),
    "prompt": Row("refused", "there are no stored prompts", (), {"id": "pmpt_1"}),
    "truncation": Row("different", "auto leaves out whole turns, and keeps the system's"),
    **{name: row for name, row in _LABELS.items() if name != "metadata"},
    **_NO_MEDIA,
    **_ignored("about tools that a server runs", "max_tool_calls"),
    **_ignored(_MEDIA, "image"),
    **_ignored("all requests have the same access", "access_programs"),
    **_refused("there are no ready-made personalities; use instructions", "personality"),
    **_refused("input is not shortened", "context_management"),
    **_refused("nothing is moderated", "moderation"),
    **_refused("send the whole conversation as input",
               "previous_input_messages previous_response"),
    **_refused("the messages behind a response are not shown", "enable_response_messages", False),
    **_refused("use text.format", "response_format"),
    **_refused("use max_output_tokens", "max_tokens max_completion_tokens"),
    **_refused("use reasoning.effort", "reasoning_effort"),
    **_refused("use input", "messages"),
    **_refused("use include", "logprobs", False),
    **_refused("a response is one answer", "n best_of", 1),
    **_refused("not served here; /v1/chat/completions has it",
               "allowed_token_ids bad_words prompt_logprobs truncate_prompt_tokens "
               "logprob_token_ids"),
    **_refused("not served here; /v1/chat/completions has it", "include_stop_str_in_output", False),
    **_refused("not served here; /v1/chat/completions has it", "skip_special_tokens", True),
    **_UNSERVED,
    **_refused("/v1/chat/completions has it", "chat_template"),
}  # fmt: skip

_POOLING: Rows = {
    **_same("model use_activation request_id cache_salt truncate_prompt_tokens truncation_side"),
    "user": _GENERATION["user"],
    "priority": _GENERATION["priority"],
    **_LABELS,
    **_NO_MEDIA,
    **_refused("use use_activation", "normalize activation softmax"),
    "padding": Row("refused", "inputs are not padded", ("do_not_pad",), "max_length"),
}

_NO_TURNS = "inputs are texts or token ids"
_INPUT: Rows = {
    **_POOLING,
    **_same("input add_special_tokens"),
    **_refused(_NO_TURNS, "messages chat_template"),
    **_refused(_NO_TURNS, "chat_template_kwargs", {}),
    **_refused(_NO_TURNS, "add_generation_prompt continue_final_message", False),
}

EMBEDDINGS: Rows = {
    **_INPUT,
    **_same("dimensions"),
    "encoding_format": Row("different", "float or base64, not bytes"),
    "prompt_name": Row("different", "vLLM has no prompts; as in sentence-transformers"),
    "embed_dtype": Row("refused", "numbers are float32", ("float32", "float"), "float16"),
    "endianness": Row("refused", "the lowest byte comes first", ("native", "little"), "big"),
    **_refused("there is one type of embedding for all inputs", "input_type task_type"),
}

POOLING: Rows = {
    **EMBEDDINGS,
    "task": Row("different", "no plugin; of each token: not of decoders as they are"),
    **_refused("there are no plugins that could read it", "data"),
}

CLASSIFY: Rows = _INPUT

SCORE: Rows = {
    **_POOLING,
    **_same("queries documents items text_1 text_2 data_1 data_2"),
    **_refused("models that write do not score", "label_token_ids"),
}

RERANK: Rows = {
    **_POOLING,
    **_same("query documents top_n return_documents"),
    "max_tokens_per_doc": Row("different", "of texts; 4096 at /v2/rerank if it is not given"),
    **_refused("documents have one text", "rank_fields"),
    **_refused("use max_tokens_per_doc", "max_chunks_per_doc"),
}

TOKENIZE: Rows = {
    **_same(
        "model prompt messages add_special_tokens add_generation_prompt continue_final_message "
        "chat_template_kwargs tools return_token_strs"
    ),
    "chat_template": CHAT["chat_template"],
    **_NO_MEDIA,
}

DETOKENIZE: Rows = {
    **_same("tokens model"),
    "skip_special_tokens": Row("different", "vLLM has no such field"),
}

_CONVERSATION: Rows = {
    **_same("model messages system tool_choice output_config output_format chat_template_kwargs"),
    "tools": Row("different", "functions only"),
    "thinking": Row("different", "a model that always thinks does; nothing is signed"),
    "mcp_servers": Row("refused", "no tools run here", ([],), [{"url": "http://localhost"}]),
    "context_management": Row("refused", "conversations are read as they are sent", (), {"a": 1}),
    **_ignored(
        "a hint for caches of other servers; prompts are cached in any case", "cache_control"
    ),
    **_refused("conversations are not summarized", "compaction"),
    **_ignored("nobody is billed", "billing_policy"),
    **_ignored("there is one tier", "speed"),
}

MESSAGES: Rows = {
    **_CONVERSATION,
    **_same("max_tokens stop_sequences stream temperature top_p top_k seed cache_salt"),
    "metadata": Row("different", "`user_id` is what `user` is elsewhere"),
    "priority": _GENERATION["priority"],
    "container": Row("refused", "no tools run here", (), "container_1"),
    **_refused("conversations are not kept here; /v1/responses keeps them", "thread"),
    **_refused("KV blocks are not handed between servers", "kv_transfer_params"),
    **_ignored("there is one tier", "service_tier inference_geo"),
    **_ignored("nobody is billed", "fallback_credit_token"),
    **_ignored("no model here declines a request that another would take", "fallbacks"),
    **_ignored("about caches, which are no part of the answer", "diagnostics"),
}

COUNT_TOKENS: Rows = _CONVERSATION

CONVERSATIONS: Rows = _same("items metadata")

_HARMLESS = {"user", "stream_options"}
"""Fields of others that change no answer: who asks, and usage where it is told in any case."""
_ON_BY_ITSELF = {
    "add_generation_prompt", "include_reasoning", "parallel_tool_calls", "skip_special_tokens"
}  # fmt: skip
_NUMBERS_BY_THEMSELVES = {
    "n": 1, "best_of": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "min_p": 0, "min_tokens": 0,
}  # fmt: skip


def _foreign(rows: Rows, others: dict[str, Rows]) -> Rows:
    """Return rows for fields that other endpoints have: whoever sends them here wants something."""
    found: Rows = {}
    for path, theirs in others.items():
        for name, row in theirs.items():
            if row.state == "ignored" or name in rows or name in _HARMLESS:
                continue
            served = row.state in ("same", "different")
            if name in found and not (served and found[name].why == _UNKNOWN_HERE):
                continue
            why = f"{_UNKNOWN_HERE}; {path} has it" if served else _UNKNOWN_HERE
            on = name in _ON_BY_ITSELF
            neutral: tuple[Any, ...] = (True,) if on else (False, "", [], {})
            if name in _NUMBERS_BY_THEMSELVES:
                neutral = (_NUMBERS_BY_THEMSELVES[name],)
            found[name] = Row("refused", why, neutral, not on, foreign=True)
    return found


_UNKNOWN_HERE = "no field of this endpoint"
_WRITING: dict[str, Rows] = {
    "/v1/chat/completions": dict(CHAT),
    "/v1/completions": dict(COMPLETIONS),
    "/v1/responses": dict(RESPONSES),
    "/v1/messages": dict(MESSAGES),
}
for _rows in (CHAT, CHATS, COMPLETIONS, RESPONSES, MESSAGES):
    _rows |= _foreign(_rows, _WRITING)

TABLE: dict[str, Rows] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHATS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDINGS,
    "/pooling": POOLING,
    "/classify": CLASSIFY,
    "/score": SCORE,
    "/rerank": RERANK,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/conversations": CONVERSATIONS,
}
"""The rows of each endpoint."""

OTHER_PATHS: dict[str, tuple[str, ...]] = {
    "/v1/responses": ("/v1/responses/input_tokens",),
    "/score": ("/v1/score",),
    "/rerank": ("/v1/rerank", "/v2/rerank"),
    "/v1/conversations": (
        "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items",
    ),
}  # fmt: skip
"""Endpoints that take the same fields as one of these, or some of them."""
