"""Routers of the operators' paths, mounted only if there is an admin key, which they require."""

from server.api import meta
from server.api.admin import endpoint, operators, trainer, weights

ADMIN_ROUTERS = (
    meta.settings_router,
    endpoint.router,
    weights.router,
    operators.router,
    trainer.router,
)
