"""Model families by maker: what their configs and their tensor names mean."""
