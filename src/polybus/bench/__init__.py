"""The benchmark: Polybus and other brokers under one load generator, in one run.

    scenarios   what is measured, compared with whom, and the targets
    brokers     how each broker is started and ended
    generator   compiles and calls the load generator (C, in `loadgen/`)
    compiling   compiles C programs once
    measure     runs the brokers in turn and keeps every sample
    report      figures, ratios, targets, and the table of all benchmarks
    msgstream   sessions: the same for WebSockets and long polls
    queues      the queue framework, which needs no bus
    spark       the data pipeline

It needs Linux and a C compiler, and works without a checkout.
"""


class BenchError(Exception):
    """The benchmark or one of its runs failed; the text says why."""
