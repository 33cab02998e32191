"""Conversion of one sequence's engine outputs to deltas.

A streamed answer is the encoded deltas; a whole answer is their encoded sum. Nothing here does I/O
or depends on an endpoint.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.shared.messages import RequestOutput, TokenLogprob
from server.generate.request import GenerationRequest, Prompt
from server.text.detokenizer import StopStrings, TokenDecoder, TokenTable

FinishReason = Literal["stop", "length", "abort"]


class RequestRefused(Exception):
    """An engine does not support the request; `param` is the responsible field."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class GenerationFailed(Exception):
    """The engine failed on the request; the text is for the log, not for the client."""


class NoRoomInEngine(Exception):
    """The engine temporarily lacks room for the request; it can be retried later."""


def failure(output: RequestOutput) -> Exception:
    """Return the exception for an output with an error."""
    reason = output.error or "no reason given"
    if output.no_room:
        return NoRoomInEngine(reason)
    if output.refused:
        return RequestRefused(reason, output.error_param)
    return GenerationFailed(reason)


class ScoredToken(msgspec.Struct):
    """A token, the offset of its text, and its log probability (None for a prompt's first)."""

    token_id: int
    text_offset: int
    logprob: TokenLogprob | None


class Delta(msgspec.Struct):
    """What one engine output adds to a sequence's answer, or the whole answer."""

    text: str
    token_ids: Sequence[int]
    logprobs: list[ScoredToken] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log probabilities of every prompt token except the first, if requested."""
    logprob_sum: float = 0.0
    """Sum over the tokens, if the engine reports log probabilities."""


def highest(scores: TokenLogprob, count: int) -> TokenLogprob:
    """Return the scores of a token with at most `count` alternatives."""
    if len(scores.top_ids) <= count:
        return scores
    return msgspec.structs.replace(
        scores, top_ids=scores.top_ids[:count], top_logprobs=scores.top_logprobs[:count]
    )


class PromptEcho:
    """A prompt as repeated in answers, computed once for all choices.

    A client that sent token IDs sees the text of all of them, including special tokens. For a text
    prompt, special tokens that were added to it are not shown.
    """

    def __init__(self, table: TokenTable, prompt: Prompt) -> None:
        self._table = table
        self._prompt = prompt
        self._spelled: tuple[str, list[int]] | None = None

    @property
    def text(self) -> str:
        """The prompt's text."""
        return self._prompt.text if self._prompt.text is not None else self._spell()[0]

    def tokens(self, scores: Sequence[TokenLogprob], shown: int) -> list[ScoredToken]:
        """Return the prompt's tokens with scores for all but the first, as far as available."""
        offsets = self._spell()[1]
        each: list[TokenLogprob | None] = [None, *[highest(one, shown) for one in scores]]
        return [
            ScoredToken(token_id, offset, score)
            for token_id, offset, score in zip(self._prompt.token_ids, offsets, each, strict=False)
        ]

    def _spell(self) -> tuple[str, list[int]]:
        """Return the text, and the offset of each token in it."""
        if self._spelled is None:
            token_ids, text = self._prompt.token_ids, self._prompt.text
            skip = False
            if text is not None:
                decode = self._table.tokenizer.decode
                # Special tokens that the client wrote are part of the text.
                skip = decode(token_ids, skip_special_tokens=True) == text
            decoder = self._table.decoder(skip_special_tokens=skip)
            pieces, offsets, offset = [], [], 0
            for token_id in token_ids:
                offsets.append(offset)
                pieces.append(decoder.push(token_id))
                offset += len(pieces[-1])
            if text is None:
                text = "".join(pieces) + decoder.flush()
            self._spelled = text, [min(offset, len(text)) for offset in offsets]
        return self._spelled


class ChoiceFold:
    """Converts the outputs of one sequence to deltas."""

    def __init__(
        self,
        table: TokenTable,
        prompt: Prompt,
        request: GenerationRequest,
        echo: PromptEcho | None = None,
    ) -> None:
        """Start after the prompt; `echo` is set if answers repeat it."""
        self._request = request
        self._echo = echo
        self._decoder: TokenDecoder = table.decoder(
            skip_special_tokens=request.skip_special_tokens, context=prompt.token_ids
        )
        self._include_stop = bool(request.fields.include_stop_str_in_output)
        """Keep the stop string, or the text of the stop token, in the text."""
        self._stops = (
            StopStrings(request.stop, include=self._include_stop) if request.stop else None
        )
        self._offset = 0
        self.num_tokens = 0
        """Tokens generated so far, up to the one that completes a stop string."""
        self.num_cached_tokens = 0
        self.finished = False

    def push(self, output: RequestOutput) -> Delta:
        """Add an output; return what it adds to the answer.

        Raises:
            GenerationFailed: the engine failed on the request.
            RequestRefused: the engine does not support the request.
            NoRoomInEngine: the engine temporarily lacks room for it.
        """
        if output.finish_reason == "error":
            raise failure(output)
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        request = self._request
        delta = Delta("", [], None if request.logprobs is None else [], None, None)
        if output.prompt_logprobs is not None:
            shown = request.fields.prompt_logprobs
            if shown is not None:
                delta.prompt_logprobs = [highest(each, shown) for each in output.prompt_logprobs]
        if self._echo is not None:
            # Precedes the answer, with log probabilities of its tokens if requested.
            delta.text = self._echo.text
            self._offset = len(delta.text)
            if delta.logprobs is not None:
                shown = request.logprobs or 0
                delta.logprobs += self._echo.tokens(output.prompt_logprobs or (), shown)
            self._echo = None
        if request.only_echo:
            rest = ""
        elif self._stops is None and output.logprobs is None:
            rest = self._add_text(output, delta)
        else:
            rest = self._add_tokens(output, delta)
        if delta.finish_reason is None and output.finish_reason is not None:
            self._finish(output, delta, rest)
        self.finished = delta.finish_reason is not None
        return delta

    def _add_text(self, output: RequestOutput, delta: Delta) -> str:
        """Add tokens without stop strings or scores; return their remaining text at the end."""
        delta.token_ids = shown = output.token_ids
        self.num_tokens += len(shown)
        if output.finish_reason is None and len(shown) == 1:
            text = self._decoder.push(shown[0])
        else:
            if self._index_of_silent_stop(output) >= 0:
                shown = shown[:-1]
            text = self._decoder.push_all(shown, last=output.finish_reason is not None)
        delta.text = delta.text + text if delta.text else text
        return ""

    def _add_tokens(self, output: RequestOutput, delta: Delta) -> str:
        """Add tokens one at a time; return their remaining text at the end."""
        pieces, token_ids = [], []
        min_tokens = self._request.sampling.min_tokens
        silent = self._index_of_silent_stop(output)
        for index, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            token_ids.append(token_id)
            if output.logprobs is not None:
                delta.logprob_sum += output.logprobs[index].logprob
                if delta.logprobs is not None:
                    scored = ScoredToken(token_id, self._offset, output.logprobs[index])
                    delta.logprobs.append(scored)
            if index == silent:
                continue
            piece = self._decoder.push(token_id)
            self._offset += len(piece)
            if self._stops is not None and self.num_tokens > min_tokens:
                piece = self._stops.push(piece)
                if self._stops.found is not None:
                    delta.finish_reason = "stop"
                    delta.stop_reason = self._stops.found
                    pieces.append(piece)
                    break
            pieces.append(piece)
        delta.token_ids = token_ids
        delta.text += "".join(pieces)
        return "" if output.finish_reason is None else self._decoder.flush()

    def _index_of_silent_stop(self, output: RequestOutput) -> int:
        """Return the index of the stop token if its text is to be omitted, else -1."""
        last = len(output.token_ids) - 1
        stopped = output.finish_reason == "stop" and output.stop_token_id is not None
        if stopped and not self._include_stop and last >= 0:
            return last if output.token_ids[last] == output.stop_token_id else -1
        return -1

    def _finish(self, output: RequestOutput, delta: Delta, rest: str) -> None:
        stopped_by: str | None = None
        if self._stops is not None:
            if rest and self.num_tokens > self._request.sampling.min_tokens:
                rest = self._stops.push(rest)
            stopped_by = self._stops.found
            rest += self._stops.flush()
        delta.text += rest
        if self._request.only_echo:
            delta.finish_reason = "length"
        elif stopped_by is not None:
            delta.finish_reason, delta.stop_reason = "stop", stopped_by
        else:
            assert output.finish_reason is not None
            assert output.finish_reason != "error"
            delta.finish_reason = output.finish_reason
            if output.stop_token_id in self._request.sampling.stop_token_ids:
                delta.stop_reason = output.stop_token_id
