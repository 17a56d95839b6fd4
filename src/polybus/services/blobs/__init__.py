"""Payloads by reference: stored as blobs, kept while a message refers to them."""
