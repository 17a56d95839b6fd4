"""Paths into JSON in SQL statements, the same on DuckDB and on Spark."""
