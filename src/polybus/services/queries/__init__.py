"""Queries over topics and tables, in processes of their own beside the bus."""
