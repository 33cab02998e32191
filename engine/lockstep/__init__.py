"""Engines that step together: waves, group formation, and a member's loop."""
