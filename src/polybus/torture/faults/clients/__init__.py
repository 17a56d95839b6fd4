"""Clients that send what they must not, do not read, or come in storms."""
