"""Whether another process still runs, by its process id."""

import os


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # The process exists and belongs to another user.
    return True
