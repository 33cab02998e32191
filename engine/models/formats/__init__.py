"""Weight file formats (safetensors, quantized, GGUF), read by the decoder's tensor names."""
