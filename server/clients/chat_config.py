"""Settings of `swell chat`; see `engine.shared.config.section` for the conventions."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import (
    CacheConfig,
    ExecutorConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    SchedulerConfig,
    Section,
)
from server.config import SupervisorConfig
from server.config.answer import AnswerConfig


class ChatSection(Section, frozen=True, kw_only=True):
    """Chat"""

    url: Annotated[str, "Base address of the server to talk to; not used with a model."] = (
        "http://127.0.0.1:8000"
    )
    port: Annotated[
        int, Meta(ge=0, le=65535), "Port of the server that is started for a model; 0: a free one."
    ] = 0
    api_key: Annotated[str | None, "Key sent as bearer token, with --url."] = None
    model_name: Annotated[
        str | None, "Name of the model to ask for; default: the first that the server lists."
    ] = None
    system_prompt: Annotated[str | None, "What the model is told before the conversation."] = None
    quick: Annotated[str | None, "Send this message, print the answer and end."] = None
    max_tokens: Annotated[
        PositiveInt | None, "Maximum tokens of an answer; default: what fits the context."
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        "Sampling temperature; default: the model's own, else 1.",
    ] = None
    request_timeout: Annotated[
        PositiveFloat, "Seconds without data from the server after which an answer is given up."
    ] = 60.0


class ChatConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell chat`: its own, and those of the server that it may start."""

    chat: ChatSection = ChatSection()
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    parallel: ParallelConfig = ParallelConfig()
    answer: AnswerConfig = AnswerConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    log: LogConfig = LogConfig()
