"""The expected answer to a request, computed without an engine."""

from engine.executor.simulated import is_penalized, penalized_seed, simulated_token
from engine.shared.messages import FinishReason, SamplingParams

VOCABULARY = 40
EOS = 3
POISON = 39
"""A prompt that begins with this token kills the engine that computes it."""
MAX_MODEL_LEN = 96


def answer(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    """Return the expected tokens and finish reason."""
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    tokens = list(prompt)
    output: list[int] = []
    longest = min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt))
    while True:
        seed = sampling.seed
        if is_penalized(sampling):
            seed = penalized_seed(seed, output)
        token = simulated_token(seed, len(tokens), tokens[-1], VOCABULARY)
        tokens.append(token)
        output.append(token)
        if token in stops and len(output) >= sampling.min_tokens:
            return output, "stop"
        if len(output) >= longest:
            return output, "length"
