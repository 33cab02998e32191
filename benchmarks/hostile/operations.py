"""Operations whose fields are attacked, with minimal valid bodies for each."""

from collections.abc import Callable
from typing import Any, NamedTuple

_HI = [{"role": "user", "content": "hi"}]
_PROMPT = {"prompt": "ROMEO:", "max_tokens": 1}
_CHAT = {"messages": _HI, "max_tokens": 1}
_RESPONSE = {"input": "hi", "max_output_tokens": 1}
_MESSAGE = {"model": "swell-shakespeare", "messages": _HI}


VALID_INPUTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["What news?"]},
    "/pooling": {"input": [[1, 2, 3]]},
    "/score": {"text_1": "What news?", "text_2": ["None", "Good"]},
    "/rerank": {"query": "What news?", "documents": ["None", {"text": "Good"}]},
}
"""A minimal request for vectors or scores, by path."""

_POOLING = VALID_INPUTS | {
    "/classify": {"input": ["What news?"]},
    "/v1/score": VALID_INPUTS["/score"],
    "/v1/rerank": VALID_INPUTS["/rerank"],
    "/v2/rerank": VALID_INPUTS["/rerank"],
}
"""Operations of pooling models only."""


class Operation(NamedTuple):
    """A path of the OpenAPI document, and valid bodies for it.

    `{response_id}` and `{conversation_id}` are placeholders for stored objects.
    """

    path: str
    rights: tuple[dict[str, Any], ...]
    pools: bool = False
    """Whether it is only for pooling models."""


OPERATIONS = {
    operation.path: operation
    for operation in (
        Operation("/v1/completions", (_PROMPT,)),
        Operation("/v1/chat/completions", (_CHAT,)),
        Operation("/v1/chat/completions/batch", ({**_CHAT, "messages": [_HI]},)),
        Operation(
            "/v1/responses",
            (
                _RESPONSE,
                {**_RESPONSE, "previous_response_id": "{response_id}"},
                {**_RESPONSE, "conversation": "{conversation_id}"},
                {**_RESPONSE, "background": True},
            ),
        ),
        Operation("/v1/responses/compact", (_RESPONSE,)),
        Operation(
            "/v1/responses/input_tokens",
            (_RESPONSE, {"input": "hi", "previous_response_id": "{response_id}"}),
        ),
        Operation("/v1/messages", ({**_MESSAGE, "max_tokens": 1},)),
        Operation("/v1/messages/count_tokens", (_MESSAGE,)),
        Operation("/v1/conversations", ({"items": [], "metadata": {"a": "b"}},)),
        Operation("/v1/conversations/{conversation_id}", ({"metadata": {"a": "b"}},)),
        Operation("/v1/conversations/{conversation_id}/items", ({"items": _HI},)),
        Operation("/tokenize", ({"prompt": "hi"}, {"messages": _HI})),
        Operation("/detokenize", ({"tokens": [1]},)),
        Operation("/invocations", (_PROMPT, _CHAT, _RESPONSE)),
        *(Operation(path, (right,), pools=True) for path, right in _POOLING.items()),
    )
}
"""By path. A test compares them and `ADMIN_OPERATIONS` with all operations of a server."""

_TRAINER = {
    "master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2,
    "timeout": 0.1,
}  # fmt: skip
_WEIGHTS = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]], "packed": False}
ADMIN_OPERATIONS = {
    operation.path: operation
    for operation in (
        Operation("/v1/load_lora_adapter", ({"lora_name": "hostile", "lora_path": "nowhere"},)),
        Operation("/v1/unload_lora_adapter", ({"lora_name": "hostile"},)),
        Operation("/admin/scale", ({"data_parallel_size": 1},)),
        Operation("/admin/weights", ({"model": "nowhere"},)),
        Operation("/init_weight_transfer_engine", ({"init_info": _TRAINER},)),
        Operation("/update_weights", ({"update_info": _WEIGHTS, "weight_version": "1"},)),
        Operation("/finish_weight_update", ({"weight_version": "1"},)),
        Operation("/collective_rpc", ({"method": "hostile"},)),
        Operation("/scale_elastic_ep", ({"new_data_parallel_size": 1, "drain_timeout": 1},)),
        Operation("/admin/utilities", ({"name": "is_sleeping", "arguments": {}, "rank": 0},)),
    )
}
"""Operations that require the admin key, by path."""

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Sends a body to a path; returns the answer."""


def keep_something(ask: Ask) -> dict[str, str]:
    """Store a response and a conversation; return the values of the placeholders."""
    return {
        "response_id": ask("/v1/responses", _RESPONSE)["id"],
        "conversation_id": ask("/v1/conversations", {"items": _HI})["id"],
    }


def named(body: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return a valid body with placeholders replaced by the ids of stored objects."""
    return {
        field: value.format(**names) if isinstance(value, str) else value
        for field, value in body.items()
    }
