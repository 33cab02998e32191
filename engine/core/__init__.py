"""The engine between sockets and tensors: what a step does with requests."""
