"""With what an engine takes no images, though its model sees."""

from engine.models.spec import VisionSpec
from engine.shared.config import EngineConfig


def why_blind(config: EngineConfig, vision: VisionSpec) -> str | None:
    """Return why images are refused; None if they are taken."""
    if not vision.sees_all:
        return None
    scheduling, parallel = config.scheduler, config.parallel
    step = scheduling.max_num_batched_tokens
    longest = scheduling.long_prefill_token_threshold or step
    needed = vision.max_tokens
    what = f"all {needed} tokens of an image see each other"
    problems = {
        f"--tensor-parallel-size, --pipeline-parallel-size: {what}, in one process": (
            parallel.processes > 1
        ),
        f"--max-num-batched-tokens {step} is less than --max-num-seqs {scheduling.max_num_seqs} "
        f"and an image, whose {needed} tokens are computed in one step": (
            step < scheduling.max_num_seqs + needed
        ),
        f"--long-prefill-token-threshold {longest} is less than the {needed} tokens of an image, "
        "which are computed in one step": longest < needed,
    }
    return next((problem for problem, is_there in problems.items() if is_there), None)
