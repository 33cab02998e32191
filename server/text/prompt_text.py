"""Tokenization of prompts at a cost bounded by the model's context, however long the text is.

Tokenizing takes about a hundred bytes of memory per byte of text. A text that is far too long is
tokenized in pieces, only until that is certain; a text that is truncated to its first or last
tokens is tokenized only at that end.
"""

from server.text.tokenizer import ServedTokenizer

_PIECE = 1 << 16
"""Characters tokenized at once."""
_MORE_BY_A_CUT = 16
"""Maximum extra tokens caused by splitting a text."""
_SLACK = 1024
"""Extra tokens from which on the tokens of part of a text are decisive for the whole.

A split can cut a token, and tokenizers that pre-split at words resynchronize at the next word. So
the tokens of a part differ from those of the whole text only near the split.
"""


class TextTooLong(Exception):
    """A text exceeds the model's context; `tokens` were counted in its first part."""

    def __init__(self, characters: int, tokens: int) -> None:
        super().__init__(f"its first {characters} characters are {tokens} tokens")
        self.tokens = tokens


async def encode_prompt(
    tokenizer: ServedTokenizer,
    text: str,
    *,
    add_special_tokens: bool,
    longest: int,
    keep: int | None = None,
    keep_beginning: bool = False,
) -> tuple[list[int], bool]:
    """Return the token IDs of a prompt, and whether they are complete.

    Args:
        longest: maximum tokens of a prompt; for a longer one an unspecified number is returned.
        keep: number of last tokens to return; None for all.
        keep_beginning: return the first `keep` tokens instead.

    Raises:
        TextTooLong: the text is much longer than `longest`.
    """
    if len(text) > max(_PIECE, 2 * longest):  # a token rarely has fewer than two characters
        if keep is None or keep > longest:
            count, slack = 0, _SLACK
            for first in range(0, len(text), _PIECE):
                piece = text[first : first + _PIECE]
                count += len(await tokenizer.encode_async(piece, add_special_tokens=False))
                slack += _MORE_BY_A_CUT
                if count > longest + slack:
                    raise TextTooLong(min(len(text), first + _PIECE), count)
        else:
            found = await _end(tokenizer, text, add_special_tokens, keep, first=keep_beginning)
            if found is not None:
                return found, False
    token_ids = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
    if keep is None or len(token_ids) <= keep:
        return token_ids, True
    return (token_ids[:keep] if keep_beginning else token_ids[-keep:]), False


async def _end(
    tokenizer: ServedTokenizer, text: str, add_special_tokens: bool, keep: int, *, first: bool
) -> list[int] | None:
    """Return the first or last tokens of a text; None if that takes most of the text."""
    size = _PIECE
    while size < len(text):
        part = text[:size] if first else text[-size:]
        found = await tokenizer.encode_async(part, add_special_tokens=add_special_tokens)
        if len(found) > keep + max(keep // 4, _SLACK):
            return found[:keep] if first else found[-keep:]
        size *= 2
    return None
