"""Nodes of a cluster die, pause or lose their brokers."""
