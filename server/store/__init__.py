"""Storage of responses and conversations for later requests, shared by a node's front ends."""
