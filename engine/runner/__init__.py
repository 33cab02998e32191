"""Owner of all device state: turns batch plans into tensors, runs the model, samples."""
