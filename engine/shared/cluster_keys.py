"""The shared secrets of a cluster, from which the keys of its TCP connections are derived.

One secret is used to connect (`--cluster-key-file`). During key rotation binding sockets accept a
second one too (`--accepted-cluster-key-file`). Both files are reloaded when they change, so that
processes with the old and the new secret can connect until all have been restarted.
"""

import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from engine.shared.config import ClusterConfig
from engine.shared.watched_file import WatchedFile, any_changed

logger = logging.getLogger(__name__)

MIN_KEY_BYTES = 16
"""Minimum length of a shared secret in bytes, without surrounding whitespace."""


class InsecureCluster(ValueError):
    """TCP would be used without a cluster key, or with a weak one."""


class KeyPair(NamedTuple):
    """A CURVE key pair in Z85."""

    public: bytes
    secret: bytes


def cluster_key_pair(shared_secret: bytes) -> KeyPair:
    """Derive the key pair of all binding sockets of a cluster from its shared secret.

    Raises:
        InsecureCluster: the secret is too short.
    """
    material = shared_secret.strip()
    if len(material) < MIN_KEY_BYTES:
        raise InsecureCluster(
            f"the cluster key has {len(material)} bytes and needs at least {MIN_KEY_BYTES}: "
            "generate one with `openssl rand -hex 32`"
        )
    seed = hashlib.blake2b(material, digest_size=32, person=b"swell-cluster").digest()
    secret = z85.encode(seed)
    return KeyPair(zmq.curve_public(secret), secret)


class ClusterKeys:
    """The current secrets, as read from their files.

    Raises:
        InsecureCluster: a file does not contain a valid secret.
        OSError: the file of the secret for connecting cannot be read.
    """

    def __init__(self, file: str, accepted_file: str | None) -> None:
        self.are_exchanged = accepted_file is not None
        """Whether a second secret is configured, so that accepted keys can change."""
        self._files = [WatchedFile(each) for each in (file, accepted_file) if each is not None]
        self.connecting, self.accepted = self._read()

    def refresh(self) -> list[KeyPair]:
        """Read the files again if they have changed; return the newly accepted keys.

        If a file is unusable, the current keys are kept.
        """
        if not any_changed(self._files):
            return []
        before = self.accepted
        try:
            self.connecting, self.accepted = self._read()
        except (InsecureCluster, OSError) as error:
            logger.error("keeping the old cluster keys: %s", error)
            return []
        removed = sum(pair not in self.accepted for pair in before)
        logger.info("cluster keys were reloaded: their files have changed")
        if removed and self.are_exchanged:
            logger.warning("the old cluster key is accepted until this process ends")
        return [pair for pair in self.accepted if pair not in before]

    def _read(self) -> tuple[KeyPair, list[KeyPair]]:
        first, *others = (file.path for file in self._files)
        connecting = _pair(first)
        accepted = [connecting]
        for path in others:
            if path.exists() and (pair := _pair(path)) not in accepted:
                accepted.append(pair)
        return connecting, accepted


def _pair(path: Path) -> KeyPair:
    try:
        return cluster_key_pair(path.read_bytes())
    except InsecureCluster as error:
        raise InsecureCluster(f"{path}: {error}") from None


def cluster_keys(cluster: ClusterConfig) -> ClusterKeys | None:
    """Return the keys of a cluster; None if it has none.

    Raises:
        InsecureCluster, OSError: see `ClusterKeys`.
    """
    if cluster.cluster_key_file is None:
        return None
    return ClusterKeys(cluster.cluster_key_file, cluster.accepted_cluster_key_file)
