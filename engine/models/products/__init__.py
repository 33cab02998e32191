"""Matrix products: packed, quantized, and independent of how many rows there are."""
