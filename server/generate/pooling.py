"""Inputs of pooling models: texts, token IDs and pairs of texts as complete token sequences."""

from collections.abc import Sequence
from contextlib import aclosing

import msgspec
from tokenizers import Tokenizer

from engine.shared.pooling import PoolingSpec
from server.errors import ApiError, element, invalid, invalid_field
from server.limits import MAX_INPUT_TOKENS
from server.text.prompt_text import TextTooLong, encode_prompt
from server.text.tokenizer import ServedTokenizer, check_vocabulary

_PROBES = ("a", "b")


class Frame(msgspec.Struct, frozen=True):
    """Special tokens before a text, between it and a second one, and at the end."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    types_from_second: bool = False
    """Whether tokens from the second text on have token type 1."""

    @property
    def size(self) -> int:
        """Total number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)

    def around(self, first: list[int], second: list[int] | None = None) -> list[int]:
        """Return the tokens of one or two texts with the special tokens added."""
        tokens = [*self.before, *first]
        if second is not None:
            tokens += [*self.between, *second]
        return [*tokens, *self.after]

    def second_from(self, first: list[int]) -> int:
        """Return the index of the first token of type 1; 0 if there is none."""
        if not self.types_from_second:
            return 0
        return len(self.before) + len(first) + len(self.between)


def _frames(backend: Tokenizer) -> tuple[Frame, Frame]:
    first, second = (backend.encode(text, add_special_tokens=False).ids for text in _PROBES)
    alone = backend.encode(_PROBES[0])
    at = _find(alone.ids, first, 0)
    single = Frame()
    if first and at is not None:
        single = Frame(tuple(alone.ids[:at]), (), tuple(alone.ids[at + len(first) :]))
    pair = backend.encode(*_PROBES)
    begin = _find(pair.ids, first, 0)
    after = None if begin is None else _find(pair.ids, second, begin + len(first))
    if not first or not second or begin is None or after is None:
        return single, Frame()
    return single, Frame(
        tuple(pair.ids[:begin]),
        tuple(pair.ids[begin + len(first) : after]),
        tuple(pair.ids[after + len(second) :]),
        types_from_second=pair.type_ids[after] == 1,
    )


def _find(ids: list[int], part: list[int], start: int) -> int | None:
    places = range(start, len(ids) - len(part) + 1)
    return next((at for at in places if ids[at : at + len(part)] == part), None)


_LONG = 1 << 14
"""Maximum characters of a text in a batch; longer texts are tokenized separately."""


class PoolingInput(msgspec.Struct, frozen=True):
    """One sequence to pool into a vector."""

    token_ids: list[int]
    types_from: int = 0
    """As in `engine.shared.messages.PoolingParams`."""


class Length(msgspec.Struct, frozen=True):
    """Maximum length of sequences, and truncation of longer ones."""

    max_tokens: int
    """Maximum tokens of the model."""
    keep: int | None = None
    """Tokens to truncate longer ones to; None: they are refused."""
    keep_beginning: bool = True
    """Whether truncation keeps the beginning or the end of a text."""

    def truncate(self, token_ids: list[int], keep: int) -> list[int]:
        """Truncate a text's tokens to at most `keep`."""
        if len(token_ids) <= keep:
            return token_ids
        return token_ids[:keep] if self.keep_beginning else token_ids[len(token_ids) - keep :]


class PoolingModel:
    """The served pooling model as seen by requests: its task, and conversion of inputs.

    The special tokens are determined by tokenizing probes. So texts can be truncated before special
    tokens are added, and texts that occur in many pairs are tokenized once.
    """

    def __init__(self, spec: PoolingSpec, tokenizer: ServedTokenizer) -> None:
        self.spec = spec
        self._tokenizer = tokenizer
        self._single, self._pair = _frames(tokenizer.backend)

    def prompt(self, name: str | None, *fallbacks: str) -> str:
        """Return a named prompt; without a name the first known fallback, or the default.

        Raises:
            KeyError: there is no prompt of that name.
        """
        spec = self.spec
        if name is not None:
            return spec.prompts[name]
        found = next((each for each in fallbacks if each in spec.prompts), spec.default_prompt)
        return spec.prompts.get(found, "") if found is not None else ""

    async def of_texts(
        self, texts: Sequence[str], length: Length, field: str, *, add_special_tokens: bool = True
    ) -> list[PoolingInput]:
        """Return one input per text.

        Raises:
            ApiError: a text is too long or has no tokens; `field` names it in the error.
        """
        frame = self._single if add_special_tokens else Frame()
        room = length.max_tokens if length.keep is None else length.keep
        if room <= frame.size:
            raise invalid_field(
                "truncate_prompt_tokens",
                f"must be more than the {frame.size} tokens that the model adds",
            )
        found = await self._tokens(texts, length, room - frame.size, field)
        return _checked([PoolingInput(frame.around(ids)) for ids in found], length, field)

    def of_token_ids(
        self, lists: Sequence[list[int]], length: Length, field: str
    ) -> list[PoolingInput]:
        """Return one input per list of token IDs, unchanged.

        Raises:
            ApiError: a list is too long or empty, or has IDs outside the vocabulary.
        """
        for index, token_ids in enumerate(lists):
            check_vocabulary(token_ids, self._tokenizer.vocab_size, element(field, index, lists))
        kept = lists
        if length.keep is not None:
            kept = [length.truncate(token_ids, length.keep) for token_ids in lists]
        return _checked([PoolingInput(token_ids) for token_ids in kept], length, field)

    async def of_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        length: Length,
        fields: tuple[str, str],
        max_second_tokens: int | None = None,
    ) -> list[PoolingInput]:
        """Return one input per pair; a single first text is paired with all second ones.

        Truncation works like `longest_first` in transformers.

        Args:
            max_second_tokens: maximum tokens of a second text, if `length` truncates.

        Raises:
            ApiError: a pair is too long; `fields` names the texts in the error.
        """
        frame = self._pair
        room = (length.max_tokens if length.keep is None else length.keep) - frame.size
        if room < 2:
            raise invalid_field(
                "truncate_prompt_tokens",
                f"leaves no room beside the {frame.size} tokens that the model adds",
            )
        left = await self._tokens(firsts, length, room, fields[0])
        right = await self._tokens(seconds, length, min(room, max_second_tokens or room), fields[1])
        pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
        found, total = [], 0
        for first, second in pairs:
            kept = (first, second)
            if length.keep is not None:
                kept = _longest_first(first, second, room, length)
            total += len(kept[0]) + len(kept[1]) + frame.size
            if total > MAX_INPUT_TOKENS:  # checked before a long text is copied for every pair
                raise _too_many(fields[1], total)
            found.append(PoolingInput(frame.around(*kept), frame.second_from(kept[0])))
        return _checked(found, length, fields[1])

    async def _tokens(
        self, texts: Sequence[str], length: Length, room: int, field: str
    ) -> list[list[int]]:
        """Tokenize texts without special tokens: short ones in batches, long ones separately."""
        short = [text for text in texts if len(text) <= _LONG]
        each = self._tokenizer.encode_each_async(short, add_special_tokens=False)
        found, total = [], 0
        async with aclosing(each) as encoded:
            for index, text in enumerate(texts):
                if len(text) <= _LONG:
                    token_ids = await anext(encoded)
                else:
                    try:
                        token_ids, _ = await encode_prompt(
                            self._tokenizer,
                            text,
                            add_special_tokens=False,
                            longest=length.max_tokens,
                            keep=None if length.keep is None else room,
                            keep_beginning=length.keep_beginning,
                        )
                    except TextTooLong as error:
                        name = element(field, index, texts)
                        raise _too_long(name, str(error), length.max_tokens) from error
                found.append(token_ids if length.keep is None else length.truncate(token_ids, room))
                total += len(found[-1])
                if total > MAX_INPUT_TOKENS:
                    raise _too_many(field, total)
        return found


def _too_long(name: str, what: str, max_tokens: int) -> ApiError:
    return invalid(
        f"{name}: this model takes at most {max_tokens} tokens, but {what}; shorten it or set "
        "truncate_prompt_tokens",
        name.partition("[")[0],
        "context_length_exceeded",
    )


def _longest_first(
    first: list[int], second: list[int], room: int, length: Length
) -> tuple[list[int], list[int]]:
    """Truncate the longer of two texts, then both equally, until they fit."""
    excess = len(first) + len(second) - room
    if excess <= 0:
        return first, second
    short = min(len(first), len(second))
    if room - short >= short:  # truncating the longer one is enough
        longest = room - short
        return length.truncate(first, longest), length.truncate(second, longest)
    half = room // 2
    return length.truncate(first, room - half), length.truncate(second, half)


def _checked(inputs: list[PoolingInput], length: Length, field: str) -> list[PoolingInput]:
    total = 0
    for index, each in enumerate(inputs):
        count = len(each.token_ids)
        name = element(field, index, inputs)
        if not count:
            raise invalid(f"{name}: must not be empty", field)
        if count > length.max_tokens:
            raise _too_long(name, f"it has {count}", length.max_tokens)
        total += count
    if total > MAX_INPUT_TOKENS:
        raise _too_many(field, total)
    return inputs


def _too_many(field: str, count: int) -> ApiError:
    return invalid_field(
        field,
        f"{count} tokens in total are more than the {MAX_INPUT_TOKENS} allowed in a request: send "
        "several requests",
    )
