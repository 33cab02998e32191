"""Token ids of a prompt, at a cost that the model's context bounds, however long the text is.

Tokenizing takes some hundred bytes of memory per byte of text. A text that is far too long is
tokenized in pieces, only until that is certain; a text that is cut to its first or last tokens only
at that end.
"""

from server.text.tokenizer import ServedTokenizer

_PIECE = 1 << 16
"""Characters that are tokenized at once."""
_MORE_BY_A_CUT = 16
"""Maximum extra tokens that a cut in a text causes."""
_SLACK = 1024
"""Extra tokens with which the tokens of a part of a text decide for all of it.

A cut in a text may cut a token, and tokenizers that split at words resume at the next word. So the
tokens of a part differ from those of the whole text only near the cut.
"""


class TextTooLong(Exception):
    """A text has more tokens than a model can hold; `tokens` were counted in its beginning."""

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
    """Return the token ids of a prompt, and whether they are all that it has.

    Args:
        tokenizer: of the model.
        text: the prompt.
        add_special_tokens: whether the tokenizer adds its own.
        longest: maximum tokens of a prompt; of a longer one an unknown number is returned.
        keep: number of last tokens to return; None for all.
        keep_beginning: return the first `keep` tokens instead.

    Raises:
        TextTooLong: the text is much longer than `longest`.
    """
    if len(text) > max(_PIECE, 2 * longest):  # a token is rarely less than two characters
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
    """Return the first or last tokens of a text from that end; None if that is most of it."""
    size = _PIECE
    while size < len(text):
        part = text[:size] if first else text[-size:]
        found = await tokenizer.encode_async(part, add_special_tokens=add_special_tokens)
        if len(found) > keep + max(keep // 4, _SLACK):
            return found[:keep] if first else found[-keep:]
        size *= 2
    return None
