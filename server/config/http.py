"""Settings of the HTTP server, its connections and access control."""

from typing import Annotated, Any

from msgspec import Meta

from engine.shared.addresses import join_host_port
from engine.shared.config import PositiveFloat, PositiveInt, Section


class HttpConfig(Section, frozen=True, kw_only=True):
    """HTTP"""

    host: Annotated[str, "Address to listen on; * is all, IPv4 and IPv6."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "Port to listen on; 0 takes a free one."] = 8000
    uds: Annotated[
        str | None,
        "Unix domain socket to listen on instead; the permissions of its directory decide who"
        " may connect.",
    ] = None
    middleware: Annotated[
        tuple[str, ...],
        "ASGI middleware that wraps the whole API, including the check of keys: a class, or a "
        "coroutine function of a request and call_next. MODULE.NAME is imported from installed "
        "packages and PYTHONPATH, never from the current directory; FILE.py:NAME names a file; "
        "NAME is an entry point of the group swell.middleware.",
    ] = ()
    model_routes: Annotated[
        str | None,
        "YAML or JSON file of models that other servers serve, `NAME: URL` each: requests for them "
        "are sent there, with the client's key. Read again when it changes.",
    ] = None
    max_logprobs: Annotated[
        int,
        Meta(ge=-1),
        "Maximum alternatives that a request may ask for per token; -1: the whole vocabulary.",
    ] = 20
    return_tokens_as_token_ids: Annotated[
        bool,
        "Log probabilities name tokens as `token_id:ID`, which is unique, unless the request says "
        "otherwise.",
    ] = False
    root_path: Annotated[
        str,
        Meta(pattern="^(/[^/?#]+)*/?$"),
        "Prefix of all paths behind a proxy, e.g. `/swell`, whether or not the proxy strips it.",
    ] = ""
    enable_force_include_usage: Annotated[
        bool,
        "Show token usage in every chunk of all streams, even if the request did not ask for it.",
    ] = False
    enable_per_request_metrics: Annotated[
        bool,
        "Include timing (`metrics`) in single-sequence responses and in the final usage chunk of "
        "streams (completions and chat completions).",
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, "Serve /tokenizer_info, which shows the chat template and the special tokens."
    ] = False
    trust_request_chat_template: Annotated[
        bool, "Accept chat_template in requests; each is rendered in a sandbox for up to 2 seconds."
    ] = False
    sse_keep_alive: Annotated[
        float,
        Meta(ge=0),
        "Seconds without output after which a stream sends a comment, so that proxies keep it "
        "open; its headers are sent after at most one second. 0: no comments, and headers with the "
        "first token.",
    ] = 15.0
    shutdown_timeout: Annotated[
        float, Meta(ge=0), "Seconds that running requests have after SIGTERM to finish."
    ] = 2.0
    access_log: Annotated[bool, "Log one line per HTTP answer."] = False
    log_stats_interval: Annotated[
        float, Meta(ge=0), "Seconds between statistics log lines of each busy engine; 0: off."
    ] = 10.0
    otlp_traces_endpoint: Annotated[
        str | None,
        "OTLP/HTTP URL to which a span per request is sent, e.g. "
        "`http://collector:4318/v1/traces` (needs `swell[otel]`); default: no traces.",
    ] = None
    metrics_prefix: Annotated[
        str, "Prefix of all metric names, e.g. `vllm:` for existing dashboards."
    ] = "swell_"
    metrics_engines: Annotated[
        int,
        Meta(ge=1, le=1024),
        "Number of engines up to which an API server's /metrics shows all of them; with more it "
        "shows those of its node, and counts sequences by engine for this many ranks.",
    ] = 64

    @property
    def address(self) -> str:
        """The address where clients connect, for display."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        return join_host_port(self.host, self.port)


class GuardConfig(Section, frozen=True, kw_only=True):
    """Access and limits"""

    api_key: Annotated[
        tuple[str, ...],
        "Key(s); clients must send one of them to all paths except /health, /ping, /ready and "
        "/version; default: no key is needed.",
    ] = ()
    api_key_file: Annotated[
        str | None,
        "File with more such keys, one per line: KEY, or NAME: KEY. Keys of the same name are "
        "one tenant.",
    ] = None
    admin_key: Annotated[str | None, "Key for /admin/*; without it there is no /admin."] = None
    admin_key_file: Annotated[
        str | None, "File with the key for /admin/*, instead of --admin-key."
    ] = None
    metrics_key: Annotated[
        str | None, "Key that opens /metrics and nothing else, for Prometheus."
    ] = None
    metrics_key_file: Annotated[
        str | None, "File with the key for /metrics, instead of --metrics-key."
    ] = None
    open_status: Annotated[
        bool | None,
        "Show the status page and /status.json, which reveal hosts and load, without a key; "
        "default: only if there is no API key.",
    ] = None
    open_docs: Annotated[
        bool | None,
        "Show /docs and /openapi.json without a key; default: only if there is no API key.",
    ] = None
    open_metrics: Annotated[
        bool | None, "Show /metrics without a key; default: only if there is no API key."
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        "Names of this server in requests' Host headers, e.g. `llm.example.com` or "
        "`*.example.com`, besides IP addresses and private names (without a dot, or below "
        "`.localhost`, `.local`, `.internal`, `.lan`, `.home.arpa`, `.svc`); others get 403. `*` "
        "allows all; default: no more without a key or certificate, else all.",
    ] = ()
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
    allow_credentials: Annotated[bool, "Let browsers send cookies and other credentials."] = False
    ssl_certfile: Annotated[
        str | None,
        "Certificate chain (PEM); serves HTTPS instead of HTTP. This file and the next two are "
        "read again when they change.",
    ] = None
    ssl_keyfile: Annotated[
        str | None, "Private key of the certificate; default: in the same file."
    ] = None
    ssl_ca_certs: Annotated[
        str | None, "Certificates of the authorities that must have signed clients' certificates."
    ] = None
    max_body_bytes: Annotated[
        PositiveInt,
        "Largest request body; the default holds the text of 500,000 tokens or the ids of 250,000. "
        "With a model that takes images there is room for one of --max-image-bytes beside that.",
    ] = 4 * 2**20
    max_body_bytes_in_flight: Annotated[
        PositiveInt,
        "Maximum bytes of request bodies that this node is still receiving; the bodies of "
        "unanswered requests may take four times as much in each front end. Requests beyond "
        "it get 503.",
    ] = 128 * 2**20
    max_header_bytes: Annotated[
        int, Meta(ge=1024), "Maximum bytes of a request's headers, and of its trailers."
    ] = 16 * 2**10
    max_connections: Annotated[
        PositiveInt,
        "Maximum connections per API-server process, within its limit of file descriptors. "
        "Beyond it, the longest idle connection of the client with the most connections is "
        "closed; if none is idle, the new one gets 503.",
    ] = 8192
    receive_timeout: Annotated[
        PositiveFloat, "Seconds that a client has to send a request's headers or body."
    ] = 60.0
    keep_alive_timeout: Annotated[
        PositiveInt, "Seconds that an idle connection is kept for reuse."
    ] = 75
    send_timeout: Annotated[
        PositiveFloat, "Seconds after which a client that does not read is cut off."
    ] = 60.0
    request_timeout: Annotated[
        PositiveFloat | None,
        "Seconds that a request may take from start to end; default: no limit.",
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
