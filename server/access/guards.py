"""Request guards: API keys, Host headers, and cross-origin pages. Plain ASGI middleware."""

import hashlib
import hmac
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.shared.fair_threads import tenant_id
from engine.shared.watched_file import WatchedFile, any_changed
from server.access.tenants import EVERYBODY, SCOPE_KEY, Tenant, named_tenant
from server.config import FrontEndConfig, GuardConfig
from server.errors import ApiError
from server.observe.metrics import FrontEndMetrics

logger = logging.getLogger(__name__)

API_PREFIX = "/v1/"
ADMIN_PREFIX = "/admin/"

_PROBES = frozenset(("/health", "/ping", "/ready", "/version"))
_PAGE = frozenset(
    (
        "/", "/status.css", "/status.js", "/access.js", "/playground.js", "/markdown-it.min.js",
        "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon.png",
    )
)  # fmt: skip
"""Static files without secrets: the page prompts for a key and fetches the data with it."""
_STATUS = "/status.json"
_DOCS = frozenset(("/docs", "/openapi.json"))
_METRICS = "/metrics"

CHECK_INTERVAL = 1.0
"""Minimum seconds between checks for changed key files."""

_PRIVATE = ("localhost", "local", "internal", "lan", "home.arpa", "svc")
"""Domains that cannot be registered, like names without a dot: no web page has such a host."""


class BadGuards(Exception):
    """The guards cannot be set up as configured; the message is shown to the user."""


class NoKey(BadGuards):
    """A key file contains no key."""


class Keys:
    """A set of secrets, of which only digests are kept, with their owners."""

    def __init__(self, secrets: Iterable[str], names: Mapping[str, str] = {}) -> None:
        """`names` maps secrets to the operator's names of owners; others get generated names."""
        self._digests: list[bytes] = []
        owners: list[tuple[str, str | None]] = []
        for number, secret in enumerate(secrets, 1):
            self._digests.append(hashlib.sha256(secret.encode()).digest())
            name = names.get(secret)
            # Not shown: with a digest, keys could be guessed offline.
            owner = f"key-{self._digests[-1].hex()[:12]}"
            owners.append((owner, f"key-{number}") if name is None else (name, None))
        # Independent of the order of the keys, because all front ends need the same slots.
        slot_of = {name: slot for slot, name in enumerate(sorted({name for name, _ in owners}))}
        self._owners = [named_tenant(name, slot_of[name], shown) for name, shown in owners]
        self.num_tenants = len(slot_of)
        """Number of distinct owners."""
        self.are_required = bool(owners)
        """Whether requests need a key; stays true if all keys are removed later."""

    def __bool__(self) -> bool:
        return self.are_required

    def __contains__(self, secret: bytes) -> bool:
        """Return whether a secret is known, in constant time."""
        return self.owner(secret) is not None

    def owner(self, secret: bytes) -> Tenant | None:
        """Return the owner of a secret, or None if it is unknown, in constant time."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for known, owner in zip(self._digests, self._owners, strict=True):
            if hmac.compare_digest(digest, known):
                found = owner
        return found


def keys_for(
    what: Literal["api", "admin", "metrics"], config: GuardConfig, may_be_empty: bool = False
) -> Keys:
    """Return the keys for the whole API, for /admin or for /metrics, if configured.

    Raises:
        BadGuards: a configured key is missing.
    """
    given, file = getattr(config, f"{what}_key"), getattr(config, f"{what}_key_file")
    if not isinstance(given, tuple):
        given = () if given is None else (given,)
    secrets = [secret.strip() for secret in given]
    owners: dict[str, str] = {}
    if file is not None:
        flag = f"--{what}-key-file"
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadGuards(f"{flag} {file} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found and not may_be_empty:
            raise NoKey(f"{flag} {file} holds no key")
        for line in found:
            owner, named, secret = line.partition(": ")
            secrets.append(secret.strip() if named else line)
            if named:
                owners[secrets[-1]] = owner.strip()
    if "" in secrets:
        raise BadGuards(f"--{what}-key must not be empty")
    keys = Keys(secrets, owners)
    keys.are_required |= file is not None
    return keys


class PathAccess:
    """The keys required for each path. Unlisted paths need an API key, if there are any.

    Key files are reloaded when they change, so that removed keys stop working. An unreadable file
    is ignored. If a file becomes empty, which may be a write in progress, its keys stop working at
    the next check.
    """

    def __init__(self, config: GuardConfig) -> None:
        """Load the keys.

        Raises:
            BadGuards: a configured key is missing.
        """
        self._config = config
        files = (config.api_key_file, config.admin_key_file, config.metrics_key_file)
        self._files = [WatchedFile(file) for file in files if file is not None]
        self._check_at = 0.0
        self._is_emptied = False
        self.admin_paths: frozenset[str] = frozenset()
        """Operator paths that are not below /admin/."""
        self._read()
        open_by_default = not self.api
        self._open_status, self._open_docs, self._open_metrics = (
            open_by_default if chosen is None else chosen
            for chosen in (config.open_status, config.open_docs, config.open_metrics)
        )

    def _read(self, may_be_empty: bool = False) -> None:
        self.api = keys_for("api", self._config, may_be_empty)
        self._admin = keys_for("admin", self._config, may_be_empty)
        self._metrics = keys_for("metrics", self._config, may_be_empty)

    @property
    def has_admin(self) -> bool:
        """Whether there is a key for /admin."""
        return bool(self._admin)

    def reload_if_changed(self, now: float) -> None:
        """Reload the keys if a file has changed, checking at most once per second."""
        if now < self._check_at or not self._files:
            return
        self._check_at = now + CHECK_INTERVAL
        was_emptied, self._is_emptied = self._is_emptied, False
        changed = any_changed(self._files)
        if not changed and not was_emptied:
            return
        try:
            self._read(may_be_empty=not changed)
        except NoKey as error:
            self._is_emptied = True
            logger.warning("%s: its keys will stop working in a second", error)
        except BadGuards as error:
            logger.error("keeping the old keys: %s", error)
        else:
            logger.info("keys were reloaded: their files have changed")

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return the error for an unauthorized request, None if it is authorized."""
        path = scope["path"]
        if (path.startswith(ADMIN_PREFIX) or path in self.admin_paths) and self._admin:
            return None if _carries(scope, (self._admin,)) else _NOT_ADMIN
        keys = self._keys_of(path)
        if keys is None or _carries(scope, keys):
            return None
        # Without any valid key for the path it is pointless to ask for one.
        if not any(keys):
            return _NOT_FOUND
        return _WRONG_KEY if _secret(scope) else _NO_KEY

    def _keys_of(self, path: str) -> tuple[Keys, ...] | None:
        operators = (self.api, self._admin)
        if path in _PROBES:
            return None
        if path in _PAGE:
            return None if self._open_status or any(operators) else operators
        if path == _STATUS:
            return None if self._open_status else operators
        if path in _DOCS:
            return None if self._open_docs else operators
        if path == _METRICS or path.startswith(_METRICS + "/"):
            return None if self._open_metrics else (*operators, self._metrics)
        return (self.api,) if self.api else None


class KnownHosts:
    """The Host headers accepted, as a defence against DNS rebinding.

    A web page can have its own name resolve to an address of this machine. The browser then treats
    this server as part of the page's origin and lets it read responses; but the requests still
    carry the page's host name.

    Args:
        names: host names, `*.example.com` for all names below one, `*` for any. IP addresses and
            names of private networks are always accepted.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._any = "*" in names
        plain = [name.lower().removesuffix(".") for name in names]
        self._names = frozenset(plain)
        self._below = tuple(
            [name[1:] for name in plain if name.startswith("*.")]
            + [f".{name}" for name in _PRIVATE]
        )
        self.knows = lru_cache(1024)(self._knows)
        """Return whether the value of a Host header is accepted (cached)."""

    def _knows(self, header: str) -> bool:
        if self._any:
            return True
        host = header.lower()
        if host.startswith("["):
            host = host[1:].partition("]")[0]
        else:
            host = host.partition(":")[0].removesuffix(".")
        if "." not in host and ":" not in host:
            return True
        if host in self._names or host.endswith(self._below):
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True


def known_hosts(config: FrontEndConfig) -> KnownHosts | None:
    """Return the hosts that a front end accepts, None for any.

    A browser sends no key for a page that does not have it, accepts no certificate for another
    name, and cannot reach a Unix socket. So by default only servers with none of these need it.
    """
    guards, http = config.guards, config.http
    safe = guards.api_key or guards.api_key_file or guards.ssl_certfile or http.uds
    if safe and not guards.allowed_hosts:
        return None
    return KnownHosts((*guards.allowed_hosts, http.host.replace("*", ""), socket.gethostname()))


def unknown_host(hosts: KnownHosts, scope: Scope) -> ApiError | None:
    """Return the error for an unaccepted host, None if the host is accepted."""
    for name, value in scope["headers"]:
        if name == b"host" and not hosts.knows(host := value.decode("latin-1")):
            return ApiError(
                403,
                f"This server does not know the host {host!r}. Its operator can allow it with "
                "--allowed-hosts, or set an API key.",
                code="unknown_host",
            )
    return None


@dataclass
class Guard:
    """Passes on requests that have an accepted host and a key for their path."""

    app: ASGIApp
    path_access: PathAccess
    hosts: KnownHosts | None
    metrics: FrontEndMetrics

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self.app(scope, receive, send)
        self.path_access.reload_if_changed(time.monotonic())
        refusal = None if self.hosts is None else unknown_host(self.hosts, scope)
        is_known, path = refusal is None, scope["path"]
        refusal = refusal or self.path_access.refusal(scope)
        if refusal is None:
            if keys := self.path_access.api:  # read by the application and its threads
                tenant = scope[SCOPE_KEY] = keys.owner(_secret(scope)) or EVERYBODY
                tenant_id.set(tenant.id)
            return self.app(scope, receive, send)
        label = "/*"  # clients must not be able to create metric series
        if is_known and path.startswith((API_PREFIX, ADMIN_PREFIX)):
            label = f"/{path.split('/')[1]}/*"
        elif is_known and (path in _DOCS or path in (_STATUS, _METRICS)):
            label = path
        self.metrics.count("http_requests", label, refusal.status)
        return refusal.send(path, send)


def _without_key(message: str) -> ApiError:
    header = ("www-authenticate", "Bearer")
    return ApiError(401, message, code="invalid_api_key", headers=(header,))


_NO_KEY = _without_key("No API key provided. Send it as 'Authorization: Bearer KEY'.")
_WRONG_KEY = _without_key("The API key is not one of this server's.")
_NOT_ADMIN = ApiError(
    403,
    "This needs the server's admin key. Send it as 'Authorization: Bearer KEY'.",
    code="admin_key_required",
)
_NOT_FOUND = ApiError(404, "Not Found.", code="not_found")


def _carries(scope: Scope, keys: Iterable[Keys]) -> bool:
    secret = _secret(scope)
    return any([secret in each for each in keys])  # a list: checks all, for constant time


def _secret(scope: Scope) -> bytes:
    other = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            return secret.strip() if scheme.lower() == b"bearer" else b""
        if name == b"x-api-key":  # from clients of /v1/messages
            other = value.strip()
    return other


def install(
    app: FastAPI, path_access: PathAccess, front_end: FrontEndConfig, metrics: FrontEndMetrics
) -> None:
    """Wrap an application in the configured guards."""
    app.add_middleware(
        Guard, path_access=path_access, hosts=known_hosts(front_end), metrics=metrics
    )
    config = front_end.guards
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        )


def tls_options(config: GuardConfig) -> dict[str, Any]:
    """Return uvicorn's options for HTTPS; empty for HTTP.

    Raises:
        BadGuards: a file is missing, or cannot be used.
    """
    files = {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
    }
    options: dict[str, Any] = {name: file for name, file in files.items() if file is not None}
    for name, file in options.items():
        if not Path(file).is_file():
            raise BadGuards(f"--{name.replace('_', '-')} {file}: there is no such file")
    if options and config.ssl_certfile is None:
        raise BadGuards("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
    if config.ssl_certfile is not None:
        _check_certificates(config, config.ssl_certfile)
    if config.ssl_ca_certs is not None:
        options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
    return options


def _check_certificates(config: GuardConfig, certificate: str) -> None:
    # OpenSSL's errors name no file.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password an encrypted key is an error, instead of a question on the terminal.
        context.load_cert_chain(certificate, config.ssl_keyfile, password="")
    except OSError as error:
        files = f"--ssl-certfile {certificate}"
        if config.ssl_keyfile is not None:
            files += f" and --ssl-keyfile {config.ssl_keyfile}"
        raise BadGuards(
            f"{files} cannot be used, a certificate and its key in PEM, without a password, "
            f"are needed: {error}"
        ) from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise BadGuards(
                f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used, it has to be in PEM: {error}"
            ) from error
