"""Stops a pipeline while it is starting.

Spark cannot be interrupted while it starts, and neither can the analysis of a pipeline. So the stop
does not wait for them. Begun flows get a moment: unfinished batches run again from their
checkpoints, as after a kill. Then Java is killed, which makes all calls to it fail, and finally
this process exits. With Spark Connect there is no Java to kill: flows get the same time as at any
other stop, because unfinished ones would continue at the server.
"""

import os
import threading
import time
from collections.abc import Callable

from polybus.processes import remove_every_scratch
from polybus.spark.pipelines.spark_sessions import end_java
from polybus.spark.session import connect

END_FLOWS_S = 0.8
END_JAVA_S = 1.0
"""How long Python may take to notice that Java has ended: it may be importing PySpark."""
END_REMOTE_S = 1.0
EXIT_S = 0.5
"""How long this process may take to exit with its own exit code."""
POLL_S = 0.05


def end_early(
    is_over: threading.Event,
    give_up: Callable[[], None],
    exit_code: Callable[[], int],
    *,
    flows_s: float,
) -> None:
    """End this process within `flows_s` plus some seconds, unless the start ends before.

    `flows_s` is the time that flows get. `give_up` is called if the start does not notice that Java
    has ended. `exit_code` is called at the end.
    """
    if is_over.wait(max(flows_s, POLL_S)):
        return
    until_s = time.monotonic() + END_JAVA_S
    while not is_over.is_set():
        end_java()
        is_over.wait(POLL_S)
        if time.monotonic() > until_s:
            give_up()
            break
    if is_over.is_set():
        time.sleep(EXIT_S)
    else:
        _end_remote()
    # At exit PySpark calls Java, and waits for its answers.
    remove_every_scratch()
    os._exit(exit_code())


def _end_remote() -> None:
    """End the sessions on a Spark Connect server, if it answers."""
    ending = threading.Thread(target=connect.end_all, name="polybus-end-remote", daemon=True)
    ending.start()
    ending.join(END_REMOTE_S)
