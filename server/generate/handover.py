"""Transfer of a prompt's KV blocks between servers by an external router.

The operator has to enable it: these fields choose the address that an engine connects to.
"""

import re
from collections.abc import Mapping

from engine.shared.addresses import join_host_port, split_host_port
from engine.shared.messages import KvSource
from server.errors import invalid_field
from server.generate.request import GenerationRequest
from server.router.generation_client import KvOffer
from server.schema.kv_transfer import KvTransferParams, RemoteKvBlocks

FIELD = "kv_transfer_params"

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[?[0-9A-Fa-f:.]+\]?")
_TCP = "tcp://"


def hand_over(request: GenerationRequest, offers: Mapping[int, KvOffer], *, allowed: bool) -> None:
    """Apply the KV transfer fields of a request: offer its blocks, or read offered ones.

    Args:
        offers: KV offers of engines, by rank.
        allowed: whether the operator lets clients use these fields.

    Raises:
        ApiError: it is not allowed or not possible.
    """
    params = request.fields.kv_transfer_params
    if params is None:
        return
    if not allowed:
        raise invalid_field(
            FIELD,
            "this server does not transfer KV blocks to other servers (--allow-kv-transfer-params)",
            "kv_transfer_not_allowed",
        )
    if params.do_remote_decode and params.do_remote_prefill:
        raise invalid_field(FIELD, "do_remote_decode and do_remote_prefill are alternatives")
    if params.do_remote_prefill:
        request.kv_source = _source(params)
    if not params.do_remote_decode:
        return
    if request.num_sequences != 1 or request.beams is not None or request.fields.stream:
        raise invalid_field(FIELD, "do_remote_decode is for one sequence, without stream")
    if not any(each.source.address.startswith(_TCP) for each in offers.values()):
        needed = "--kv-role, and --data-parallel-address"
        raise invalid_field(FIELD, f"no engine here offers KV blocks over TCP ({needed})")
    request.offers_blocks = True


def transfer_params(request: GenerationRequest, offer: KvOffer | None) -> RemoteKvBlocks | None:
    """Return the transfer parameters for the router's next request; None if nothing is readable.

    Args:
        offer: of the engine that computed the prompt.
    """
    if offer is None or not offer.source.address.startswith(_TCP):
        return None
    host, port = split_host_port(offer.source.address.removeprefix(_TCP))
    num_blocks = (request.num_prompt_tokens - 1) // offer.block_size
    return RemoteKvBlocks(
        f"{offer.source.incarnation:x}", list(range(num_blocks)), request.request_id, host, port
    )


def _source(params: KvTransferParams) -> KvSource:
    engine, host, port = params.remote_engine_id, params.remote_host, params.remote_port
    if engine is None or host is None or port is None:
        raise invalid_field(
            FIELD, "do_remote_prefill needs remote_engine_id, remote_host and remote_port"
        )
    if not _HOST.fullmatch(host):
        raise invalid_field(FIELD, "remote_host is neither a name nor an address")
    try:
        incarnation = int(engine, 16)
    except ValueError:
        raise invalid_field(FIELD, "remote_engine_id is not the id of a Swell engine") from None
    if not 0 <= incarnation < 1 << 63:
        raise invalid_field(FIELD, "remote_engine_id is not the id of a Swell engine")
    return KvSource(f"{_TCP}{join_host_port(host, port)}", incarnation)
