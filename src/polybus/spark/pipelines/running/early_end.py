"""The end of a pipeline that is asked for while it starts.

Spark cannot be interrupted while it starts, and neither can the analysis of a pipeline. Nobody
waits for them. Flows that have begun get a moment: what they do not finish is run again from their
checkpoints, as after a kill. Then Java is ended, at which all calls to it fail; and at last this
process.
"""

import os
import threading
import time
from collections.abc import Callable

from polybus.processes import remove_every_scratch
from polybus.spark.pipelines.spark_sessions import end_java

END_FLOWS_S = 0.8
END_JAVA_S = 1.0
"""How long Python may take to see that Java has ended: it may be importing PySpark."""
POLL_S = 0.05


def end_early(
    is_ready: threading.Event,
    is_over: threading.Event,
    give_up: Callable[[], None],
    *,
    has_flows: bool,
) -> None:
    """End this process within END_FLOWS_S + END_JAVA_S, unless the start is over or ready before.

    `give_up` is called if it does not see that Java has ended.
    """
    if is_ready.is_set() or is_over.wait(END_FLOWS_S if has_flows else POLL_S):
        return
    until_s = time.monotonic() + END_JAVA_S
    while not is_over.is_set():
        end_java()
        is_over.wait(POLL_S)
        if is_ready.is_set():
            return
        if time.monotonic() > until_s:
            give_up()
            break
    # What PySpark does at the end of a process asks Java, and waits for its answers.
    remove_every_scratch()
    os._exit(0)
