"""Settings of `swell run-batch`; see `engine.shared.config.section` for the conventions."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import (
    CacheConfig,
    ExecutorConfig,
    LogConfig,
    ModelConfig,
    NonNegativeInt,
    ParallelConfig,
    PositiveFloat,
    SchedulerConfig,
    Section,
)
from server.config import SupervisorConfig
from server.config.answer import AnswerConfig


class BatchConfig(Section, frozen=True, kw_only=True):
    """Batch"""

    input_file: Annotated[
        str, "File of requests, one JSON object per line (OpenAI's batch format)."
    ] = ""
    output_file: Annotated[
        str,
        "File for the answers, one line per request; requests that it already answers are not"
        " sent again.",
    ] = ""
    url: Annotated[
        str | None, "Address of a running server; default: one is started for the batch."
    ] = None
    api_key: Annotated[str | None, "Key sent as bearer token, with --url."] = None
    max_concurrency: Annotated[int, Meta(ge=1, le=10_000), "Maximum requests in flight."] = 256
    request_timeout: Annotated[PositiveFloat, "Seconds after which a request is given up."] = 3600.0
    max_retries: Annotated[
        NonNegativeInt,
        "How often a request is sent again if the server was too busy or did not answer.",
    ] = 10


class RunBatchConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell run-batch`: its own, and those of the server that it may start."""

    batch: BatchConfig = BatchConfig()
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    parallel: ParallelConfig = ParallelConfig()
    answer: AnswerConfig = AnswerConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    log: LogConfig = LogConfig()
