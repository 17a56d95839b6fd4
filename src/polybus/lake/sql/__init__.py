"""SQL statements before an engine has them: their words, the names in them, and rewrites."""
