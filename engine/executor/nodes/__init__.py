"""Workers of an engine on other nodes: joining the leader, and forwarding of their sockets."""
