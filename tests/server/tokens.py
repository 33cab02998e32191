"""Token ids by text, for tests."""

from tokenizers import Tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token, which must be in the vocabulary."""
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id
