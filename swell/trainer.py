"""A trainer's end of weights in place: sends tensors into the engines of a server that runs.

Needs torch and the address of the server; what it does can be done with torch alone
(docs/training.md).
"""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from engine.distributed.plain import PlainGroup, join_plain_group
from engine.distributed.spec import GroupBroken, GroupSpec, open_listener
from engine.shared.addresses import join_host_port

CPU = torch.device("cpu")

HTTP_MARGIN = 1800.0
"""Seconds that engines may take to load what they have received."""

_ANSWERS_WITHIN = 5.0
"""Maximum seconds to wait, after a group has ended, until the server says why."""


class TransferFailed(Exception):
    """The engines did not get the weights and still serve the old ones; retry with a new sender."""


class WeightSender:
    """A group with all engines of a server; a context manager.

    Engines that start later are not in it: then `send` fails and another one has to be made.
    """

    def __init__(
        self,
        url: str,
        admin_key: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        device: torch.device = CPU,
        timeout: float = 60.0,
    ) -> None:
        """Meet the engines.

        Args:
            url: of the server, without path.
            host: address of this machine that engines can reach; they meet there.
            port: where they meet; 0 takes a free one.
            device: of the engines' models: tensors for CUDA devices go over NCCL.
            timeout: seconds that all wait to meet, and for each tensor.

        Raises:
            TransferFailed: not all engines came, or the server refuses.
        """
        self._url, self._key, self._timeout = url.rstrip("/"), admin_key, timeout
        self._device = device
        self._pool = ThreadPoolExecutor(1, "calls")
        size = 1 + int(self._call("/get_world_size", None)["world_size"])
        listener = open_listener(host, port)
        port = listener.getsockname()[1]
        info = {
            "master_address": host, "master_port": port, "rank_offset": 1, "world_size": size,
            "timeout": timeout,
        }  # fmt: skip
        spec = GroupSpec(join_host_port(host, port), 0, size, 0, timeout)
        asked = self._pool.submit(self._call, "/init_weight_transfer_engine", {"init_info": info})
        self.group: PlainGroup | None = None
        """Of this trainer, rank 0, and the engines; None when it was left."""
        try:
            self.group = join_plain_group(spec, device, listener)
            asked.result()
        except (GroupBroken, TransferFailed) as error:
            self.close()
            raise _reason(asked, error) from error

    def send(self, tensors: Mapping[str, Tensor], version: str | None = None) -> None:
        """Replace the weights of all engines, between two of their steps.

        Args:
            tensors: all that the model's checkpoint has, by their names there, with float types.
            version: what the weights are called, in answers' `X-Weight-Version`, too; default: a
                number that grows.

        Raises:
            TransferFailed: the engines keep the weights that they have, and have left the group.
        """
        assert self.group is not None, "it was closed"
        info = {
            "names": list(tensors),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }
        body = {"update_info": info, "weight_version": version}
        asked = self._pool.submit(self._call, "/update_weights", body)
        try:
            for each in tensors.values():
                values = each.detach().to(self._device).contiguous()
                self.group.broadcast(values, lambda: not asked.done())
            asked.result()
        except (GroupBroken, TransferFailed) as error:
            self.close()
            raise _reason(asked, error) from error

    def close(self) -> None:
        """Leave the group."""
        self.group = None
        self._pool.shutdown(wait=False)

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout + HTTP_MARGIN) as answer:
                said: dict[str, Any] = json.load(answer)
                return said
        except urllib.error.HTTPError as error:
            raise TransferFailed(f"{path}: {error.code}: {error.read().decode()}") from error
        except OSError as error:
            raise TransferFailed(f"{path}: {error}") from error


def _reason(asked: "Future[dict[str, Any]]", error: Exception) -> TransferFailed:
    """Return the server's reason, if it soon says one, which is better than the network's."""
    with contextlib.suppress(TimeoutError):
        if (said := asked.exception(_ANSWERS_WITHIN)) is not None:
            return TransferFailed(str(said))
    return TransferFailed(str(error))
