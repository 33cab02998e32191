"""The frames of a stream of chunks, as completions and chat completions have it."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from server.api.chat.schema import ChatChunkChoice
from server.api.completions.schema import CompletionChoice
from server.api.rendering import timing_shown
from server.errors import ApiError
from server.generate.request import GenerationRequest
from server.schema.answer import Usage

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class UsageSoFar:
    """Counts the tokens of each choice of a stream."""

    def __init__(self, prompt_tokens: Sequence[int], choices: int) -> None:
        """`prompt_tokens` are those of each prompt, `choices` how many each prompt has."""
        self._prompt_tokens = prompt_tokens
        self._choices = choices
        self._counts: dict[int, int] = {}

    def add(self, index: int, tokens: int) -> None:
        """Count tokens of a choice."""
        self._counts[index] = self._counts.get(index, 0) + tokens

    def of(self, index: int) -> Usage:
        """Return the usage of a choice so far."""
        prompt, count = self._prompt_tokens[index // self._choices], self._counts.get(index, 0)
        return Usage(prompt, count, prompt + count, UNSET)


ShownChoice = ChatChunkChoice | CompletionChoice
"""What a chunk shows of a choice."""


class ChunkFrames:
    """Frames of one stream: only the choice is encoded, what surrounds it is ready bytes."""

    def __init__(self, kind: str, id_: str, request: GenerationRequest) -> None:
        """`kind` is the type of the chunks, `id_` the answer's."""
        self._request = request
        options = request.fields.stream_options
        wanted = options is not None and bool(options.include_usage)
        self._include_usage = wanted or request.force_usage
        self.so_far: UsageSoFar | None = None
        """Counts what each choice has before any of it is shown, if every chunk tells it."""
        if options is not None and self._include_usage and options.continuous_usage_stats:
            lengths = [len(prompt.token_ids) for prompt in request.prompts]
            self.so_far = UsageSoFar(lengths, request.n)
        head = {"id": id_, "object": kind, "created": request.created, "model": request.model}
        self._prefix = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def chunk(self, choice: ShownChoice) -> bytes:
        """Return the frame of a chunk with one choice."""
        if self.so_far is not None:
            return self._with_more(choice, {"usage": self.so_far.of(choice.index)})
        return self._prefix + _encode(choice) + self._suffix

    def chunks(
        self, choices: Sequence[ShownChoice], prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """Return the frames of several chunks; the first has the prompt if there is one."""
        frames = [self.chunk(choice) for choice in choices]
        if prompt_token_ids is not None:
            more: dict[str, object] = {"prompt_token_ids": prompt_token_ids}
            if self.so_far is not None:
                more["usage"] = self.so_far.of(choices[0].index)
            elif self._include_usage:
                more["usage"] = None
            frames[0] = self._with_more(choices[0], more)
        return b"".join(frames)

    def _with_more(self, choice: ShownChoice, more: dict[str, object]) -> bytes:
        return self._prefix + _encode(choice) + b"]," + _encode(more)[1:] + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        """Return the last frames; a chunk without choices has the usage if that is wanted."""
        if not self._include_usage:
            return DONE
        metrics = timing_shown(self._request, usage)
        timed = b"" if metrics is UNSET else b',"metrics":' + _encode(metrics)
        return self._prefix + b'],"usage":' + _encode(usage) + timed + b"}\n\n" + DONE


def error_frames(error: ApiError) -> bytes:
    """Return the last frame of a stream that ends with an error: `[DONE]` is for whole answers."""
    return b"data: " + error.body() + b"\n\n"
