"""How KV blocks of a prompt are handed from one server to another, in vLLM's words."""

from typing import Annotated

import msgspec
from pydantic import Field

from server.schema.body import Name, RequestBody


class KvTransferParams(RequestBody):
    """What an outside router asks of the server that computes a prompt, and of the one after it."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Name | None = None
    remote_block_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    remote_host: Name | None = None
    remote_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    remote_request_id: Name | None = None
    tp_size: Annotated[int, Field(ge=1, le=1024)] | None = None


class KvHandedOn(msgspec.Struct):
    """What the server that answers has to be asked with."""

    remote_engine_id: str
    """Of the engine process that has computed the prompt."""
    remote_block_ids: list[int]
    """Which of the prompt's blocks it offers: their names follow from its tokens."""
    remote_request_id: str
    remote_host: str
    remote_port: int
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    tp_size: int = 1
