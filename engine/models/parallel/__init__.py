"""One model over several processes: experts spread over engines, tensors cut over ranks."""
