"""The coordinator: who is there, how loaded each engine is, and which wave it is."""
