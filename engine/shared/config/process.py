"""Settings of every process: logging and the health port."""

from typing import Annotated, Literal

from msgspec import Meta

from engine.shared.config.section import PositiveFloat, Section


class HealthConfig(Section, frozen=True, kw_only=True):
    """Health"""

    health_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        "Port on which an engine or a coordinator answers GET /health and /ready, on all "
        "interfaces; default: none. Under `swell serve` the first engine of the node has this port "
        "and the others the next ones.",
    ] = None
    stall_timeout: Annotated[
        PositiveFloat,
        "Seconds without progress of the main loop after which the process counts as unhealthy; "
        "an engine's steps may take longer, as --step-timeout says.",
    ] = 60.0


class LogConfig(Section, frozen=True, kw_only=True):
    """Logging"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], "Lowest level of log lines that is shown."
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], "text: lines for people; json: one JSON object per line."
    ] = "text"
