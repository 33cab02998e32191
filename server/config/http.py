"""Settings of the HTTP server, of its connections and of who may use it."""

from typing import Annotated, Any

from msgspec import Meta

from engine.shared.config import PositiveFloat, PositiveInt, Section


class HttpConfig(Section, frozen=True, kw_only=True):
    """HTTP"""

    host: Annotated[str, "Address to listen on; * is all, IPv4 and IPv6."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "Port to listen on; 0 takes a free one."] = 8000
    max_logprobs: Annotated[
        int,
        Meta(ge=-1),
        "Maximum alternatives that a request may ask for per token; -1: all of the vocabulary.",
    ] = 20
    root_path: Annotated[
        str,
        Meta(pattern="^(/[^/?#]+)*/?$"),
        "Prefix of all paths behind a proxy, e.g. `/swell`, whether or not the proxy takes it off.",
    ] = ""
    enable_force_include_usage: Annotated[
        bool, "End every stream with its usage, asked for or not."
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, "Serve /tokenizer_info, which shows the chat template and the special tokens."
    ] = False
    shutdown_timeout: Annotated[
        float, Meta(ge=0), "Seconds that requests in flight get to end after SIGTERM."
    ] = 2.0
    access_log: Annotated[bool, "Log a line per HTTP answer."] = False
    log_stats_interval: Annotated[
        float, Meta(ge=0), "Seconds between log lines on what each busy engine does; 0: none."
    ] = 10.0
    otlp_traces_endpoint: Annotated[
        str | None,
        "OTLP/HTTP URL to which a span per request is sent, e.g. "
        "`http://collector:4318/v1/traces` (needs `swell[otel]`); default: no traces.",
    ] = None
    metrics_prefix: Annotated[
        str, "Prefix of all metric names, e.g. `vllm:` for existing dashboards."
    ] = "swell_"


class GuardConfig(Section, frozen=True, kw_only=True):
    """Access and limits"""

    api_key: Annotated[
        tuple[str, ...],
        "Key(s) of which clients must send one, but to /health, /ping, /ready and /version; "
        "default: none needed.",
    ] = ()
    api_key_file: Annotated[
        str | None,
        "File with such keys in addition, one per line: KEY, or NAME: KEY. Keys of one name are "
        "one tenant.",
    ] = None
    admin_key: Annotated[str | None, "Key for /admin/*; without one there is no /admin."] = None
    admin_key_file: Annotated[str | None, "File with the key for /admin/*, instead."] = None
    metrics_key: Annotated[
        str | None, "Key that opens /metrics and nothing else, for what scrapes it."
    ] = None
    metrics_key_file: Annotated[str | None, "File with the key for /metrics, instead."] = None
    open_status: Annotated[
        bool | None,
        "Whether the status page and /status.json, which show hosts and load, need no key; "
        "default: only where there is no API key.",
    ] = None
    open_docs: Annotated[bool | None, "The same for /docs and /openapi.json."] = None
    open_metrics: Annotated[bool | None, "The same for /metrics."] = None
    allowed_origins: Annotated[
        tuple[str, ...], "Web origins whose pages may call the API (CORS); * allows all."
    ] = ()
    allowed_methods: Annotated[tuple[str, ...], "HTTP methods that such pages may use."] = (
        "GET",
        "POST",
    )
    allowed_headers: Annotated[tuple[str, ...], "Request headers that such pages may send."] = (
        "*",
    )
    allow_credentials: Annotated[bool, "Whether browsers may send cookies and the like along."] = (
        False
    )
    ssl_certfile: Annotated[
        str | None, "Certificate chain (PEM); serves HTTPS instead of HTTP."
    ] = None
    ssl_keyfile: Annotated[
        str | None, "Private key of the certificate; default: in the same file."
    ] = None
    ssl_ca_certs: Annotated[
        str | None, "Certificates of the authorities that clients must have theirs from."
    ] = None
    max_body_bytes: Annotated[
        PositiveInt,
        "Largest request body; the default holds the text of 500,000 tokens or the ids of 250,000.",
    ] = 4 * 2**20
    max_body_bytes_in_flight: Annotated[
        PositiveInt,
        "Maximum bytes of unfinished request bodies that this node holds; what does not fit is "
        "answered with 503.",
    ] = 128 * 2**20
    max_header_bytes: Annotated[
        int, Meta(ge=1024), "Largest head of a request, and largest trailers."
    ] = 16 * 2**10
    max_connections: Annotated[
        PositiveInt,
        "Maximum connections per API-server process, as far as descriptors allow; beyond it the "
        "longest idle one of whoever has most gives way, else 503.",
    ] = 8192
    receive_timeout: Annotated[
        PositiveFloat, "Seconds that a client may take to send a request's head or body."
    ] = 60.0
    keep_alive_timeout: Annotated[
        PositiveInt, "Seconds for which an idle connection is kept for reuse."
    ] = 75
    send_timeout: Annotated[
        PositiveFloat, "Seconds after which a client that does not read is cut off."
    ] = 60.0
    request_timeout: Annotated[
        PositiveFloat | None, "Seconds that a request may take in all; default: no limit."
    ] = None

    @property
    def has_keys(self) -> bool:
        """Whether clients of the API need a key."""
        return bool(self.api_key) or self.api_key_file is not None

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self.ssl_certfile is None else "https"

    def __repr__(self) -> str:
        return "GuardConfig(...)"  # holds secrets

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []
