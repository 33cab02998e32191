"""The HTTP layer: connections, bodies, errors, server-sent events. Independent of models."""
