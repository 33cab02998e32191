"""Engines that step together: waves, groups, and the loop of a member."""
