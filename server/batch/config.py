"""Settings of `swell run-batch`; see `engine.shared.config.section` for the conventions."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import NonNegativeInt, PositiveFloat, Section
from server.config import OwnServerConfig


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


class RunBatchConfig(OwnServerConfig, frozen=True):
    """All that `swell run-batch` needs to know."""

    batch: BatchConfig = BatchConfig()
