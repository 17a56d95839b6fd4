"""History: each topic's older messages as Parquet, how they are added and removed."""
