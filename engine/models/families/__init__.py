"""Model families by maker: interpretation of their configs and tensor names."""
