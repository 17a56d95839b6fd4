"""History: each topic's older messages as Parquet, and how they get there and go."""
