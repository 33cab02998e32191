"""Admission to a cluster: members must speak the same protocol and serve the same model.

Engines determine what a cluster serves. An engine has to agree with the other engines, and a front
end with the registered engines; front ends alone are not checked. When the first engine of another
model registers after all engines of the previous model have left, front ends whose settings differ
are removed: they retry, and are admitted again when engines of their model return.
"""

from collections.abc import Mapping

from engine.shared.group_config import MODEL_KEYS, stated_in
from engine.shared.messages import PUSHED, EngineSetup, Hello, Refused, WeightsSource
from engine.shared.version import SPOKEN_PROTOCOLS, SWELL_VERSION

SIZE_KEY = "data_parallel_size"


def refused_by_protocol(protocol: int, version: str) -> Refused | None:
    """Return a refusal if the protocol version is not supported, else None."""
    if protocol in SPOKEN_PROTOCOLS:
        return None
    spoken = " or ".join(map(str, SPOKEN_PROTOCOLS))
    return Refused(
        f"protocol is {protocol or 'older than 1'} there (Swell {version or 'unknown'}) but "
        f"{spoken} at the coordinator (Swell {SWELL_VERSION}): all processes of a cluster need "
        "versions of Swell that are at most one protocol apart",
        field="protocol",
    )


def refused_by_settings(hello: Hello, engines: Mapping[int, Mapping[str, str]]) -> Refused | None:
    """Return a refusal that names the first differing setting, None if there is none.

    Args:
        engines: the settings of all engines but the newcomer, by rank.
    """
    size = hello.group_config.get(SIZE_KEY, "1")
    if not size.isdecimal():
        return Refused(f"{SIZE_KEY} is {size!r}: it must be a number", field=SIZE_KEY)
    for rank, engine_config in engines.items():
        if hello.kind == "front_end":
            field = differing_model(hello.group_config, engine_config)
            duty = "front ends have to serve the model that the engines do"
        else:
            # A group can grow and shrink, so its initial size need not agree.
            names = stated_in(engine_config, hello.protocol).keys() - {SIZE_KEY}
            field = _differing(hello.group_config, engine_config, tuple(sorted(names)))
            duty = "all engines of a cluster must agree"
        if field is not None:
            return Refused(
                f"{field} is {hello.group_config.get(field)!r} here but {engine_config[field]!r} "
                f"on engine {rank}: {duty}",
                field=field,
            )
    return None


def differing_model(front_end: Mapping[str, str], engine: Mapping[str, str]) -> str | None:
    """Return the first model setting in which a front end and an engine differ, None if none."""
    return _differing(front_end, engine, tuple(key for key in MODEL_KEYS if key in engine))


def _differing(
    config: Mapping[str, str], other: Mapping[str, str], names: tuple[str, ...]
) -> str | None:
    return next((name for name in names if config.get(name) != other[name]), None)


def refused_by_weights(
    rank: int,
    setup: EngineSetup | None,
    others: Mapping[int, EngineSetup],
    ordered: WeightsSource | None = None,
) -> Refused | None:
    """Return a refusal if an engine's loaded weights differ from its peers', else None.

    While a trainer pushes the weights nothing is refused: an engine without them takes no requests.
    """
    if ordered is not None and ordered.model == PUSHED:
        return None
    for peer, peer_setup in others.items():
        if setup is None or peer == rank:
            continue
        if peer_setup.model_fingerprint != setup.model_fingerprint:
            return Refused(
                f"the weights of this engine ({setup.model_fingerprint}) are not those "
                f"of engine {peer} ({peer_setup.model_fingerprint})",
                field="model_fingerprint",
            )
    return None
