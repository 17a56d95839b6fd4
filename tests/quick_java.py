"""Whatever imports this starts Spark's Java with its first compiler only.

Most of what a test runs in Java runs a few times: the second compiler and its counters take a
fifth of the processor time and give nothing back. What a flow computes is the same.
"""

from polybus.spark.session import gateway

gateway.COMPILER_OPTIONS = ("-XX:TieredStopAtLevel=1",)
