"""Workers of an engine on other nodes: how these join its leader, and how bytes get to and fro."""
