"""One model over several processes: expert, tensor and pipeline parallelism."""
