"""Queries over topics and tables, in separate processes beside the bus."""
