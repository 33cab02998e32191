"""Who may come in: keys, and pages of other web origins. Plain ASGI around the application."""

import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.shared.watched_file import WatchedFile, any_changed
from server.access.tenants import EVERYBODY, SCOPE_KEY, Tenant, named_tenant
from server.config import GuardConfig
from server.http.errors import ApiError
from server.observe.metrics import FrontEndMetrics

logger = logging.getLogger(__name__)

API_PREFIX = "/v1/"
ADMIN_PREFIX = "/admin/"

_PROBES = frozenset(("/health", "/ping", "/ready", "/version"))
_PAGE = frozenset(("/", "/status.css", "/status.js"))
"""Files that hold nothing about the server: the page asks for the key and gets the data with it."""
_ADMIN = frozenset(("/server_info", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
_STATUS = frozenset(("/status.json",))
_DOCS = frozenset(("/docs", "/docs/oauth2-redirect", "/openapi.json"))
_METRICS = "/metrics"


LOOK_INTERVAL = 1.0
"""Seconds between looks at whether the files of keys have changed."""


class BadGuards(Exception):
    """The guards cannot be set up as configured; the message is for people."""


class Keys:
    """A set of secrets, of which only digests are kept, and whose they are."""

    def __init__(self, secrets: Iterable[str], names: Mapping[str, str] = {}) -> None:
        """`names` has what the operator calls the owners of some secrets."""
        self._digests: list[bytes] = []
        owners: list[str] = []
        for secret in secrets:
            self._digests.append(hashlib.sha256(secret.encode()).digest())
            owners.append(names.get(secret) or f"key-{self._digests[-1].hex()[:12]}")
        # In an order that does not depend on that of the keys, as all front ends need the same.
        place_of = {name: place for place, name in enumerate(sorted(set(owners)))}
        self._owners = [named_tenant(name, place_of[name]) for name in owners]
        self.num_tenants = len(place_of)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, secret: bytes) -> bool:
        """Whether it is one of them, in a time that tells nothing about any of them."""
        return self.owner(secret) is not None

    def owner(self, secret: bytes) -> Tenant | None:
        """Return whose secret it is, if it is one of them; takes as long as for any other."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for known, owner in zip(self._digests, self._owners, strict=True):
            if hmac.compare_digest(digest, known):
                found = owner
        return found


def api_keys(config: GuardConfig) -> Keys:
    """Return the keys for all but /admin.

    Raises:
        BadGuards: there is no key where one is said to be.
    """
    return _keys(config.api_key, config.api_key_file, "api")


def admin_keys(config: GuardConfig) -> Keys:
    """Return the key for /admin, if there is one.

    Raises:
        BadGuards: there is no key where one is said to be.
    """
    given = () if config.admin_key is None else (config.admin_key,)
    return _keys(given, config.admin_key_file, "admin")


def _keys(given: tuple[str, ...], file: str | None, name: str) -> Keys:
    secrets = [secret.strip() for secret in given]
    owners: dict[str, str] = {}
    if file is not None:
        flag = f"--{name}-key-file"
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadGuards(f"{flag} {file} cannot be read: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise BadGuards(f"{flag} {file} holds no key")
        for line in found:
            owner, named, secret = line.partition(": ")
            secrets.append(secret.strip() if named else line)
            if named:
                owners[secrets[-1]] = owner.strip()
    if "" in secrets:
        raise BadGuards(f"--{name}-key must not be empty")
    return Keys(secrets, owners)


def metrics_keys(config: GuardConfig) -> Keys:
    """Return the key for /metrics alone, if there is one.

    Raises:
        BadGuards: there is no key where one is said to be.
    """
    given = () if config.metrics_key is None else (config.metrics_key,)
    return _keys(given, config.metrics_key_file, "metrics")


class Doors:
    """Which keys open which path. What nobody thought of needs an API key, if there are any.

    Keys in files are read again when the files change, so that one that is taken out opens
    nothing any more. A file that cannot be used changes nothing.
    """

    def __init__(self, config: GuardConfig) -> None:
        """Read the keys.

        Raises:
            BadGuards: there is no key where one is said to be.
        """
        self._config = config
        files = (config.api_key_file, config.admin_key_file, config.metrics_key_file)
        self._files = [WatchedFile(file) for file in files if file is not None]
        self._look_at = 0.0
        self._read()
        open_by_default = not self.api
        self._open_status, self._open_docs, self._open_metrics = (
            open_by_default if chosen is None else chosen
            for chosen in (config.open_status, config.open_docs, config.open_metrics)
        )

    def _read(self) -> None:
        config = self._config
        self.api, self._admin, self._metrics = (
            api_keys(config), admin_keys(config), metrics_keys(config),
        )  # fmt: skip

    @property
    def num_tenants(self) -> int:
        """How many tenants have API keys."""
        return self.api.num_tenants

    @property
    def has_admin(self) -> bool:
        """Whether there is a key for /admin."""
        return bool(self._admin)

    def look(self, now: float) -> None:
        """Read the keys again if a file has changed, which is asked once a second at most."""
        if now < self._look_at or not self._files:
            return
        self._look_at = now + LOOK_INTERVAL
        if not any_changed(self._files):
            return
        try:
            self._read()
        except BadGuards as error:
            logger.error("keys stay as they were: %s", error)
        else:
            logger.info("keys were read again: their files have changed")

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return why a request does not get in, None if it does."""
        path = scope["path"]
        if (path.startswith(ADMIN_PREFIX) or path in _ADMIN) and self._admin:
            return None if _carries(scope, (self._admin,)) else _NOT_ADMIN
        keys = self._keys_of(path)
        if keys is None or _carries(scope, keys):
            return None
        # Where no key opens a door there is no use in asking for one.
        return _NO_KEY if any(keys) else _NO_DOOR

    def _keys_of(self, path: str) -> tuple[Keys, ...] | None:
        """Return the keys that open a path, None if it is open."""
        operators = (self.api, self._admin)
        if path in _PROBES:
            return None
        if path in _PAGE:
            return None if self._open_status or any(operators) else operators
        if path in _STATUS:
            return None if self._open_status else operators
        if path in _DOCS:
            return None if self._open_docs else operators
        if path == _METRICS or path.startswith(_METRICS + "/"):
            return None if self._open_metrics else (*operators, self._metrics)
        return (self.api,) if self.api else None


class KeyGuard:
    """Lets requests through only with a key that opens their path."""

    def __init__(self, app: ASGIApp, doors: Doors, metrics: FrontEndMetrics) -> None:
        self._app = app
        self._doors = doors
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._doors.look(time.monotonic())
        refusal = self._doors.refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            _note_tenant(scope, self._doors.api)
            await self._app(scope, receive, send)
            return
        self._metrics.http_request(_label(scope["path"]), refusal.status)
        body = refusal.body(scope["path"])
        headers = [(name.encode(), value.encode()) for name, value in refusal.headers]
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(body)).encode()))
        start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})


def _label(path: str) -> str:
    """Return the name under which refusals of a path are counted; clients do not make names."""
    for prefix in (API_PREFIX, ADMIN_PREFIX):
        if path.startswith(prefix):
            return f"{prefix}*"
    return path if path in _STATUS | _DOCS or path == _METRICS else "/*"


_NO_KEY = ApiError(
    401,
    "Incorrect API key provided. Send it as 'Authorization: Bearer KEY'.",
    code="invalid_api_key",
    headers=(("www-authenticate", "Bearer"),),
)
_NOT_ADMIN = ApiError(
    403,
    "This needs the server's admin key. Send it as 'Authorization: Bearer KEY'.",
    code="admin_key_required",
)


_NO_DOOR = ApiError(404, "There is no such path.", code="not_found")


def _carries(scope: Scope, keys: Iterable[Keys]) -> bool:
    secret = _secret(scope)
    return any([secret in each for each in keys])  # all of them, so that time tells nothing


def _note_tenant(scope: Scope, keys: Keys) -> None:
    """Write into a request's scope whose key it carries."""
    if keys and scope["type"] == "http":
        scope[SCOPE_KEY] = keys.owner(_secret(scope)) or EVERYBODY


def _secret(scope: Scope) -> bytes:
    """Return what a request has for a key; empty, which is none, if it has nothing.

    Clients of /v1/messages send theirs as `x-api-key`.
    """
    other = b""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, secret = value.partition(b" ")
            return secret.strip() if scheme.lower() == b"bearer" else b""
        if name == b"x-api-key":
            other = value.strip()
    return other


def install(app: FastAPI, doors: Doors, config: GuardConfig, metrics: FrontEndMetrics) -> None:
    """Put the configured guards around an application."""
    app.add_middleware(KeyGuard, doors=doors, metrics=metrics)
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
    """Return what uvicorn needs to serve HTTPS; empty for HTTP.

    Raises:
        BadGuards: a file is missing.
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
    if config.ssl_ca_certs is not None:
        options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
    return options
