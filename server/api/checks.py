"""What is checked of the fields that requests of several endpoints have."""

from server.errors import invalid_field
from server.generate.model import ServedModel
from server.schema.fields import SamplingFields
from server.text.tokenizer import check_vocabulary


def check_fields(request: SamplingFields, model: ServedModel) -> tuple[str, ...]:
    """Check what can be checked without tokenizing; return the texts that end an answer.

    Raises:
        ApiError: the request is wrong, or asks for too much; `param` names the field.
    """
    if request.prompt_logprobs is not None:
        if request.stream:
            raise invalid_field("prompt_logprobs", "not available when stream is true")
        request.prompt_logprobs = model.alternatives(request.prompt_logprobs, "prompt_logprobs")
    named = request.logprob_token_ids
    if named:
        check_vocabulary(named, model.tokenizer.vocab_size, "logprob_token_ids")
        if len(set(named)) < len(named):
            raise invalid_field("logprob_token_ids", "a token is named twice")
    if request.stream_options is not None and not request.stream:
        raise invalid_field("stream_options", "only allowed when stream is true")
    stop = request.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise invalid_field("stop", "strings must not be empty")
    if request.truncate_prompt_tokens == 0:
        raise invalid_field("truncate_prompt_tokens", "must be -1 or at least 1")
    return stops
