"""The administrator's way in: a Unix socket and a token."""
