"""SQL statements before an engine parses them: their tokens, names, and rewrites."""
