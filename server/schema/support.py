"""How far fields of requests are served: said on the fields of bodies, and beside them.

A field that a body declares is served as OpenAI's and vLLM's servers do, unless its
`json_schema_extra` says otherwise. What is known of fields that a body does not declare stands in
its class attribute `undeclared`. Those that would change what a request means are refused by name,
others are ignored (`server.api.compatibility`); docs/compatibility.md is written from all of it.
"""

from typing import Any, Literal

import msgspec

State = Literal["same", "different", "refused", "ignored"]

KEY = "x-swell"
"""Of a field's `json_schema_extra`."""


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
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


def extra(state: State, why: str, *neutral: Any, example: Any = True) -> dict[str, Any]:
    """Return the `json_schema_extra` of a declared field."""
    return {KEY: msgspec.to_builtins(Row(state, why, neutral, example))}


def different(why: str) -> dict[str, Any]:
    """Return the `json_schema_extra` of a declared field that is served in another way."""
    return extra("different", why)


def ignored(why: str, names: str) -> Rows:
    """Return rows of undeclared fields that change nothing in an answer."""
    return {name: Row("ignored", why) for name in names.split()}


def refused(why: str, names: str, *neutral: Any, example: Any = None) -> Rows:
    """Return rows of fields that are refused unless they have a neutral value."""
    if example is None:
        example = True not in [value for value in neutral if value is True]
    return {name: Row("refused", why, neutral, example) for name in names.split()}


USER = different("the operator may have requests limited and queued by it")
PRIORITY = different("refused unless the operator allows it")
TOP_LOGPROBS = different("bounded by --max-logprobs")
CHAT_TEMPLATE = different("only with --trust-request-chat-template; bounded")
LABEL = "a label for the operator's books"
CACHE_HINT = "a hint for caches and queues of other servers; prompts are cached in any case"
MEDIA = "media are prepared as the files of the model say"

LABELS = ignored(LABEL, "metadata safety_identifier session_id") | ignored(
    CACHE_HINT, "prompt_cache_key prompt_cache_retention prompt_cache_options service_tier"
)
NO_MEDIA = ignored(MEDIA, "media_io_kwargs mm_processor_kwargs")

_NO_SAMPLER = "tokens are not drawn in this way here"
_NO_PROCESSORS = "there are no custom logits processors"
NO_KV_TRANSFER = refused("KV blocks are not handed between servers", "kv_transfer_params")

UNSERVED: Rows = {
    **refused("there are no encoder caches to hand over", "ec_transfer_params"),
    **refused("there are no extensions that could read it", "vllm_xargs", {}),
    **refused("repetition is not looked for", "repetition_detection"),
    **refused("answers are not marked", "watermarking", False),
    **refused(_NO_PROCESSORS, "logits_processors", []),
    **refused(_NO_PROCESSORS, "custom_logit_processor", ""),
    **refused("routed experts are not shown", "routed_experts_prompt_start", 0),
    **refused(
        "use structured_outputs",
        "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern "
        "structural_tag regex ebnf json_schema grammar choice format",
        "", {}, [],
    ),
    **refused("use max_tokens", "max_new_tokens n_predict num_predict", -1),
    **refused("use repetition_penalty", "repeat_penalty", 1),
    **refused("use chat_template_kwargs", "enable_thinking think"),
    **refused("its fields belong into the body", "extra_body options", {}),
    **refused("name the adapter as model", "lora_path", ""),
    **refused("this model reads text", "images image_data video_data audio_data", []),
    **refused(_NO_SAMPLER, "typical_p tfs_z", 1),
    **refused(
        _NO_SAMPLER,
        "mirostat mirostat_mode top_a dry_multiplier xtc_probability dynatemp_range eta_cutoff "
        "epsilon_cutoff smoothing_factor no_repeat_ngram_size",
        0,
    ),
    **ignored(
        "a hint for other servers",
        "keep_alive cache_prompt id_slot client_metadata anthropic_beta anthropic_version",
    ),
}  # fmt: skip
"""What servers of other makes have where text is generated."""

NO_BUDGET = refused("/v1/chat/completions has it; limit max_tokens", "thinking_token_budget", -1)
