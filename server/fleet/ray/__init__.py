"""Processes on the nodes of a Ray cluster; nothing else imports Ray."""
