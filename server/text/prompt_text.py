"""Token ids of a prompt, at the price of what a model can hold, however long its text is.

Tokenizing takes some hundred bytes of memory per byte of text. Of a text that is far too long only
the beginning is tokenized, in pieces, to know that it is; of one that is cut to its first or last
tokens only that end.
"""

from server.text.tokenizer import ServedTokenizer

_PIECE = 1 << 16
"""Characters that are tokenized at once, whatever they are."""
_MORE_BY_A_CUT = 16
"""Tokens that a text has more, at most, because it was cut."""
_SLACK = 1024
"""Tokens more than needed that settle a question about the tokens of a part of a text.

Where a text is cut, a token may be cut too, and tokenizers that look at words cut anew at the next
one: the tokens of a part are those of the whole but for a few where it was cut.
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
    keep: int | None,
    keep_beginning: bool = False,
) -> tuple[list[int], bool]:
    """Return the token ids of a prompt, and whether they are all that it has.

    Args:
        tokenizer: of the model.
        text: the prompt.
        add_special_tokens: whether the tokenizer adds its own.
        longest: tokens that the model can hold; of a longer prompt an unknown number comes back.
        keep: how many of the last tokens to return; None for all.
        keep_beginning: return so many of the first tokens instead.

    Raises:
        TextTooLong: the text is much longer than `longest`.
    """
    if len(text) > max(_PIECE, 2 * longest):  # a token is rarely less than two characters
        if keep is None or keep > longest:
            await _refuse_too_long(tokenizer, text, longest)
        else:
            found = await _end(tokenizer, text, add_special_tokens, keep, first=keep_beginning)
            if found is not None:
                return found, False
    token_ids = await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)
    if keep is None or len(token_ids) <= keep:
        return token_ids, True
    return (token_ids[:keep] if keep_beginning else token_ids[-keep:]), False


async def _refuse_too_long(tokenizer: ServedTokenizer, text: str, longest: int) -> None:
    """Count the tokens of one piece after the other, until there are too many."""
    count, slack = 0, _SLACK
    for first in range(0, len(text), _PIECE):
        piece = text[first : first + _PIECE]
        count += len(await tokenizer.encode_async(piece, add_special_tokens=False))
        slack += _MORE_BY_A_CUT
        if count > longest + slack:
            raise TextTooLong(min(len(text), first + _PIECE), count)


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
