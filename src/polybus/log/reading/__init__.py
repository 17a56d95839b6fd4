"""A data folder read by another process than the bus."""
