"""Matrix products: packed, quantized, and independent of the number of rows."""
