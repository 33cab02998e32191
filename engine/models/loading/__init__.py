"""From a checkpoint to a decoder's layers."""
