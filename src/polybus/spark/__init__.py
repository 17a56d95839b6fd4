"""Spark: topics as streams and tables, and results back to topics (PySpark)."""
