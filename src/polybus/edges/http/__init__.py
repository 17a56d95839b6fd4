"""The HTTP edge: msgstream for clients, an API for programs, metrics for operators."""
