"""The data pipeline's benchmark: what Spark, DuckDB and we do with the same messages, in one run.

corpus      messages in a log, once in the journal and once handed over to history
reading     a topic to a count and to Parquet: our source, Spark's own reader, DuckDB
following   a stream that follows the bus at full speed, and what that costs the bus
delays      from a publish to the row in silver, and to an alert on a WebSocket; cold start
figures     what was measured, its bar, the table
"""
