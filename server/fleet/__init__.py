"""Process management of one node: start, watch, restart and stop."""
