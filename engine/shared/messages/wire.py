"""Base class of all messages, and their encoding."""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all wire messages: frozen, encoded as an array, tagged with the class name.

    A renamed class states its first name as `tag`, which other releases know.
    """


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the encoded message."""
    return _encoder.encode(message)
