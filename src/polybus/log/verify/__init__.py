"""Checks of everything that a stopped bus has on disk."""
