"""Edges own sockets: they turn bytes into bus calls and batches into bytes on the wire."""
