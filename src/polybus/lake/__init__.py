"""Lake tables: Delta tables, which any engine reads; SQL on topics and tables."""
