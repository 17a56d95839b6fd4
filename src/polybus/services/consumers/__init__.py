"""Consumers: programs outside the bus that report how far they have read."""
