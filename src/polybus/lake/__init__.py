"""Lake tables: Parquet files with a list of which ones count, read by any engine."""
