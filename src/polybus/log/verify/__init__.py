"""Checks everything that a stopped bus has stored."""
