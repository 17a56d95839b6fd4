"""What can go wrong with a benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark, or one run of it, could not be made; the text says why."""
