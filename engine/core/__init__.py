"""The engine between sockets and tensors: how requests become steps, and steps outputs."""
