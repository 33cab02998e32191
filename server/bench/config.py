"""Settings of `swell bench`; see `engine.shared.config.section` for the conventions.

Where vLLM's `bench serve` has an option for the same thing, its name is used.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.shared.config import NonNegativeInt, PositiveFloat, PositiveInt, Section


class BenchError(Exception):
    """The run cannot start or continue; the message says why."""


class TargetConfig(Section, frozen=True, kw_only=True):
    """Target"""

    url: Annotated[str, "Base address of the server; requests go nowhere else."] = (
        "http://127.0.0.1:8000"
    )
    base_url: Annotated[str | None, "Same as --url; takes precedence over it."] = None
    backend: Annotated[
        Literal["openai", "openai-chat"], "openai sends completions, openai-chat chat completions."
    ] = "openai"
    model: Annotated[str | None, "Model to ask for; default: the first that the server lists."] = (
        None
    )
    api_key: Annotated[str | None, "Key sent as bearer token."] = None
    header: Annotated[tuple[str, ...], "More request headers, each as NAME=VALUE."] = ()
    request_timeout: Annotated[PositiveFloat, "Seconds after which a request is given up."] = 120.0

    @property
    def address(self) -> str:
        """Base address of the server."""
        return self.base_url or self.url

    def headers(self) -> dict[str, str]:
        """Return the headers of every request.

        Raises:
            BenchError: a header is not NAME=VALUE.
        """
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        for word in self.header:
            name, separator, value = word.partition("=")
            if not (name and separator):
                raise BenchError(f"--header {word}: expected NAME=VALUE")
            headers[name] = value
        return headers


class WorkloadConfig(Section, frozen=True, kw_only=True):
    """Workload"""

    dataset_name: Annotated[
        Literal["random", "sharegpt", "custom"],
        "random draws prompts of exact lengths; sharegpt reads conversations; custom reads "
        "prompts from a file.",
    ] = "random"
    dataset_path: Annotated[
        str | None,
        "sharegpt: JSON file of conversations; custom: JSON lines with `prompt` (and "
        "`output_tokens`), or plain text with a prompt per line.",
    ] = None
    num_prompts: Annotated[
        int, Meta(ge=1, le=1_000_000), "Number of requests that are measured."
    ] = 1000
    num_warmups: Annotated[
        int,
        Meta(ge=0, le=100_000),
        "Number of requests sent first to warm up; they are not measured.",
    ] = 8
    random_input_len: Annotated[PositiveInt, "random: prompt tokens after the common prefix."] = (
        1024
    )
    random_output_len: Annotated[PositiveInt, "random: output tokens."] = 128
    random_range_ratio: Annotated[
        float,
        Meta(ge=0, lt=1),
        "random: lengths are drawn evenly from LEN * (1 - ratio) to LEN * (1 + ratio).",
    ] = 0.0
    random_prefix_len: Annotated[
        NonNegativeInt, "random: tokens with which every prompt begins."
    ] = 0
    random_vocab_size: Annotated[
        PositiveInt | None,
        "random: draw token ids below this number; default: draw from the ids that the "
        "server's /tokenize returns for a text.",
    ] = None
    sharegpt_output_len: Annotated[
        PositiveInt | None, "sharegpt: output tokens; default: as many as the recorded answer has."
    ] = None
    custom_output_len: Annotated[
        PositiveInt, "custom: output tokens where the file does not say."
    ] = 256
    ignore_eos: Annotated[bool, "Generate all output tokens, whatever the model says."] = False
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None, "Sampling temperature; default: the server's."
    ] = None
    extra_body: Annotated[str | None, "JSON object that is merged into every request body."] = None
    stream: Annotated[bool, "Stream answers; with --no-stream only whole answers are timed."] = True
    seed: Annotated[int, "Seed of prompts, lengths and arrivals."] = 0

    def extra_fields(self) -> dict[str, Any]:
        """Return the fields to merge into every request body.

        Raises:
            BenchError: not a JSON object, or it sets a field that has its own setting.
        """
        text = self.extra_body
        try:
            extra = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        except msgspec.DecodeError as error:
            raise BenchError(f"--extra-body: {error}") from error
        if owned := extra.keys() & {"stream", "stream_options", "n"}:
            raise BenchError(f"--extra-body cannot set {', '.join(sorted(owned))}")
        return extra


class TrafficConfig(Section, frozen=True, kw_only=True):
    """Traffic"""

    request_rate: Annotated[
        PositiveFloat, "Requests per second; inf sends them as soon as possible."
    ] = float("inf")
    burstiness: Annotated[
        PositiveFloat,
        "Shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, "
        "less is burstier, more is steadier.",
    ] = 1.0
    max_concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        "Maximum requests in flight; default: no limit.",
    ] = None
    processes: Annotated[int, Meta(ge=1, le=256), "Processes that send requests."] = 1
    time_limit: Annotated[
        PositiveFloat, "Seconds after which requests that still run are cut off."
    ] = 600.0
    keep_alive: Annotated[
        bool, "Reuse connections; with --no-keep-alive each request opens its own."
    ] = True


class ReportConfig(Section, frozen=True, kw_only=True):
    """Report"""

    goodput: Annotated[
        tuple[str, ...],
        "Latency limits in ms that a request must meet to count as good, e.g. `ttft:500 "
        "tpot:50`; e2el limits the whole answer.",
    ] = ()
    metric_percentiles: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=100)], ...], "Percentiles to show for every latency."
    ] = (50.0, 90.0, 95.0, 99.0)
    output: Annotated[str | None, "JSON file for the result."] = None
    save_detailed: Annotated[bool, "Add every request to the JSON file."] = False
    plot: Annotated[str | None, "PNG file for a plot (needs the `plot` extra)."] = None
    progress: Annotated[bool, "Show the live display."] = True


class BenchConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell bench`."""

    target: TargetConfig = TargetConfig()
    workload: WorkloadConfig = WorkloadConfig()
    traffic: TrafficConfig = TrafficConfig()
    report: ReportConfig = ReportConfig()
