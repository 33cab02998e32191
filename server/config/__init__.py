"""Settings of the front ends and the supervisor; conventions: `engine.shared.config.section`."""

from server.config.commands import ApiServerConfig, FrontEndConfig, ServeConfig
from server.config.fleet import NodesConfig, RayConfig, SupervisorConfig
from server.config.http import GuardConfig, HttpConfig
from server.config.load import OverloadConfig, RoutingConfig, TenantConfig
from server.config.media import MediaConfig
from server.config.store import StoreConfig

__all__ = [
    "ApiServerConfig",
    "FrontEndConfig",
    "GuardConfig",
    "HttpConfig",
    "MediaConfig",
    "NodesConfig",
    "OverloadConfig",
    "RayConfig",
    "RoutingConfig",
    "ServeConfig",
    "StoreConfig",
    "SupervisorConfig",
    "TenantConfig",
]
