"""The frames of a stream of chunks, as completions and chat completions have it."""

from collections import Counter
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
        tells_each = options is not None and bool(options.continuous_usage_stats)
        tells_each &= self._include_usage
        self.counts: Counter[int] | None = Counter() if tells_each else None
        """Tokens of each choice, added before they are shown, if every chunk tells them."""
        head = {"id": id_, "object": kind, "created": request.created, "model": request.model}
        self._prefix = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def chunk(self, choice: ShownChoice) -> bytes:
        """Return the frame of a chunk with one choice."""
        if self.counts is not None:
            return self._with_more(choice, {"usage": self._usage(self.counts, choice.index)})
        return self._prefix + _encode(choice) + self._suffix

    def chunks(
        self, choices: Sequence[ShownChoice], prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """Return the frames of several chunks; the first has the prompt if there is one."""
        frames = [self.chunk(choice) for choice in choices]
        if prompt_token_ids is not None:
            more: dict[str, object] = {"prompt_token_ids": prompt_token_ids}
            if self.counts is not None:
                more["usage"] = self._usage(self.counts, choices[0].index)
            elif self._include_usage:
                more["usage"] = None
            frames[0] = self._with_more(choices[0], more)
        return b"".join(frames)

    def _usage(self, counts: Counter[int], index: int) -> Usage:
        """Return the usage of a choice so far."""
        prompt = len(self._request.prompts[index // self._request.n].token_ids)
        return Usage(prompt, counts[index], prompt + counts[index], UNSET)

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
