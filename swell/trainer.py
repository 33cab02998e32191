"""A trainer's side of weight updates: sends tensors to the engines of a running server.

Needs torch and the server's address; the same can be done with torch alone (docs/training.md).
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
"""Seconds for engines to load the weights that they have received."""

_ANSWERS_WITHIN = 5.0
"""Maximum seconds to wait for the server's reason after a group has failed."""


class TransferFailed(Exception):
    """The engines did not get the weights and still serve the old ones; retry with a new sender."""


class WeightSender:
    """A group with all engines of a server; a context manager.

    Engines that start later are not members: then `send` fails and a new sender is needed.
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
        """Connect to the engines.

        Args:
            url: of the server, without path.
            host: address of this machine that engines can reach, for the rendezvous.
            port: port of the rendezvous; 0 selects a free one.
            device: device of the engines' models: tensors for CUDA devices are sent over NCCL.
            timeout: seconds to wait for other members, to join and for each tensor.

        Raises:
            TransferFailed: not all engines joined, or the server refused.
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
        answer = self._pool.submit(self._call, "/init_weight_transfer_engine", {"init_info": info})
        self.group: PlainGroup | None = None
        """Group of this trainer (rank 0) and the engines; None once closed."""
        try:
            self.group = join_plain_group(spec, device, listener)
            answer.result()
        except (GroupBroken, TransferFailed) as error:
            self.close()
            raise _reason(answer, error) from error

    def send(self, tensors: Mapping[str, Tensor], version: str | None = None) -> None:
        """Replace the weights of all engines, between two of their steps.

        Args:
            tensors: all tensors of the model's checkpoint, by name, with floating-point dtypes.
            version: version name of the weights, also in answers' `X-Weight-Version`; default: an
                increasing number.

        Raises:
            TransferFailed: the engines keep their weights, and have left the group.
        """
        assert self.group is not None, "it was closed"
        info = {
            "names": list(tensors),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }
        body = {"update_info": info, "weight_version": version}
        answer = self._pool.submit(self._call, "/update_weights", body)
        try:
            for each in tensors.values():
                values = each.detach().to(self._device).contiguous()
                self.group.broadcast(values, lambda: not answer.done())
            answer.result()
        except (GroupBroken, TransferFailed) as error:
            self.close()
            raise _reason(answer, error) from error

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
                result: dict[str, Any] = json.load(answer)
                return result
        except urllib.error.HTTPError as error:
            raise TransferFailed(f"{path}: {error.code}: {error.read().decode()}") from error
        except OSError as error:
            raise TransferFailed(f"{path}: {error}") from error


def _reason(answer: "Future[dict[str, Any]]", error: Exception) -> TransferFailed:
    """Prefer the server's reason, if it arrives soon, over the network error."""
    with contextlib.suppress(TimeoutError):
        if (reason := answer.exception(_ANSWERS_WITHIN)) is not None:
            return TransferFailed(str(reason))
    return TransferFailed(str(error))
