"""HTTP itself: connections, bodies, errors, server-sent events. Knows no model and no engine."""
