"""Clients that send invalid data, do not read, or connect in storms."""
