"""Payloads by reference: stored as blobs, kept while a message points at them."""
