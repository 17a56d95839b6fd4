"""Pipelines: the standard one, and those that users declare, on Structured Streaming."""
