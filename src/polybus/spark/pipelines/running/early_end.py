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

from polybus.spark.pipelines.spark_sessions import end_java

END_FLOWS_S = 0.8
END_JAVA_S = 1.0
"""How long Python may take to see that Java has ended: it may be importing PySpark."""
POLL_S = 0.05


def end_early(
    is_ready: threading.Event, is_over: threading.Event, give_up: Callable[[], None]
) -> None:
    """End a start within END_FLOWS_S + END_JAVA_S, unless it is over or ready before.

    `give_up` is called before this process is ended.
    """
    if is_ready.is_set() or is_over.wait(END_FLOWS_S):
        return
    until_s = time.monotonic() + END_JAVA_S
    while not is_over.wait(POLL_S) and not is_ready.is_set():
        end_java()
        if time.monotonic() > until_s:
            give_up()
            os._exit(0)
