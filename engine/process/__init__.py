"""The engine process: sockets, threads and signals around the core."""
