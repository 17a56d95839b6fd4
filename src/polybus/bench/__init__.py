"""The benchmark: Polybus and other brokers under one load generator, in one run.

    scenarios   what is measured, against whom, and the bar for each
    brokers     how each broker is started, and ended
    generator   compiles and calls the load generator (C, in `loadgen/`)
    measure     runs everything, the brokers in turn, and keeps every sample
    report      medians, ratios, the table
    msgstream   sessions: the same for WebSockets and long polls
    queues      the queue framework, which needs no bus

It needs Linux and a C compiler, nothing of a checkout.
"""
