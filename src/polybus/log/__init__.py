"""Storage: the shared journal, each topic's history, and the memory log."""
