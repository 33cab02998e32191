"""Self-signed certificates for this machine's own address."""

import subprocess
from pathlib import Path


def make_certificate(certificate: Path, key: Path) -> None:
    """Write a certificate and its EC key; generating an RSA key takes a second."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
