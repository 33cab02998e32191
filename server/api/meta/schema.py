"""What the server tells about itself."""

from typing import Any, Literal

import msgspec


class Model(msgspec.Struct):
    """A name by which the served model may be called."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    parent: str | None = None
    tool_call_parser: str | None = None
    """The format in which the model's tool calls are read; None for models of other servers."""
    reasoning_parser: str | None = None
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    """All served names."""

    data: list[Model]
    object: Literal["list"] = "list"


class HealthResponse(msgspec.Struct):
    """This process lives, or takes traffic."""

    status: str


class LoadResponse(msgspec.Struct):
    """How much the front ends of this node have taken on, as vLLM's servers tell it."""

    server_load: int
    """Sequences that have not ended."""
    server_load_tokens: int
    """Prompt tokens of them that have not been computed."""


class ServerInfo(msgspec.Struct):
    """What the server runs with."""

    version: str
    config: dict[str, Any]
    """Settings by section; what is secret is not shown."""


class TokenizerInfo(msgspec.Struct):
    """What there is to know of the served tokenizer."""

    vocab_size: int
    eos_token_ids: list[int]
    special_tokens: list[str]
    chat_template: str | None
    max_model_len: int | None


class VersionResponse(msgspec.Struct):
    """Version of the distribution, and of the messages that its processes exchange."""

    version: str
    protocol: int
