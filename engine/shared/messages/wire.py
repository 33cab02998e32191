"""Base class of all messages, and their encoding."""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all wire messages: frozen, tagged with the class name, encoded as an array."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the encoded message."""
    return _encoder.encode(message)
