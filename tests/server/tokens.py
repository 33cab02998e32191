"""Ids of tokens, for tests that name tokens by their spelling."""

from tokenizers import Tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the vocabulary has."""
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id
