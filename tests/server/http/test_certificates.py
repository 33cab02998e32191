"""Certificates that are renewed while a server runs."""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from server.access.guards import tls_options
from server.config import GuardConfig
from server.http.tls import CHECK_INTERVAL, Certificates
from tests.server.http.test_http_protocol import served
from tests.support.certificates import make_certificate
from tests.support.waiting import PATIENCE


class Secret:
    """A directory with a certificate and key, replaced atomically like the kubelet does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        self.renew()
        for name in ("tls.crt", "tls.key"):
            (path / name).symlink_to(Path("data", name))

    def renew(self) -> None:
        """Replace certificate and key atomically."""
        self._number += 1
        made = self.path / f"{self._number}"
        made.mkdir()
        make_certificate(made / "tls.crt", made / "tls.key")
        (self.path / "next").symlink_to(f"{self._number}")
        (self.path / "next").rename(self.path / "data")

    @property
    def guards(self) -> GuardConfig:
        return GuardConfig(
            ssl_certfile=str(self.path / "tls.crt"), ssl_keyfile=str(self.path / "tls.key")
        )

    @property
    def shown(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert((self.path / "tls.crt").read_text())

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.path / "tls.crt")


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret(tmp_path)


async def certificate_at(port: int) -> bytes:
    """Return the certificate presented to a new connection."""
    anything = ssl.create_default_context()
    anything.check_hostname, anything.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=anything)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def test_renewed_certificate_is_used_for_new_connections_only(
    app: Any, secret: Secret
) -> None:
    # By default clients keep idle connections for five seconds.
    limits = httpx.Limits(keepalive_expiry=PATIENCE)
    async with (
        served(app, secret.guards) as port,
        httpx.AsyncClient(verify=secret.trusting(), timeout=PATIENCE, limits=limits) as kept,
    ):
        url = f"https://127.0.0.1:{port}/health"
        assert (await kept.get(url)).status_code == 200
        first = secret.shown
        assert await certificate_at(port) == first
        secret.renew()
        assert secret.shown != first
        shown = first
        while shown != secret.shown:
            shown = await certificate_at(port)
        assert (await kept.get(url)).status_code == 200, "its certificate is the first"
        async with httpx.AsyncClient(verify=secret.trusting(), timeout=PATIENCE) as client:
            assert (await client.get(url)).status_code == 200


def certificates(secret: Secret) -> Certificates:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, log_config=None, **tls_options(secret.guards))
    config.load()
    assert config.ssl is not None
    return Certificates(config, config.ssl)


def test_certificate_files_are_checked_periodically(
    secret: Secret,
) -> None:
    watched = certificates(secret)
    first = watched.current(0)
    assert watched.current(CHECK_INTERVAL) is first
    secret.renew()
    assert watched.current(1.5 * CHECK_INTERVAL) is first
    second = watched.current(2 * CHECK_INTERVAL)
    assert second is not first
    assert watched.current(3 * CHECK_INTERVAL) is second


def test_mismatched_certificate_files_are_ignored(
    secret: Secret, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = certificates(secret)
    first = watched.current(0)
    other = tmp_path / "other"
    other.mkdir()
    make_certificate(other / "tls.crt", other / "tls.key")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    # A non-atomic renewal: first the certificate, then its key.
    (other / "tls.crt").rename(certificate)
    assert watched.current(CHECK_INTERVAL) is first
    key.unlink()
    assert watched.current(2 * CHECK_INTERVAL) is first
    assert [each.levelno for each in caplog.records] == [logging.ERROR, logging.ERROR]
    assert str(key) in caplog.text
    (other / "tls.key").rename(key)
    assert watched.current(3 * CHECK_INTERVAL) is not first
