"""The HTTP edge: msgstream for clients, an API for programs, figures for operators."""
