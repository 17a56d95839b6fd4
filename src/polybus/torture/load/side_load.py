"""The base of loads other than messages: their clients, and users' processes."""

import asyncio
import ctypes
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polybus.errors import PolybusError
from polybus.torture.bus.child import BusChild
from polybus.torture.bus.control import CONTROL
from polybus.torture.bus.warm import processes, start_server
from polybus.torture.load.ledger import MessageLedger
from polybus.torture.report import Findings


@dataclass
class SideLoad:
    """The clients of one data folder over many buses, with the promises that they got."""

    _child: BusChild
    _chance: random.Random
    _findings: Findings
    _messages: MessageLedger
    _stopping: asyncio.Event

    async def _done_by_user(
        self, work: Callable[..., object], *given: Any, is_over: Callable[[], bool], s_max: float
    ) -> bool:
        """Whether a process of its own does the work, as of a user; its disk is that of the bus."""
        await asyncio.to_thread(start_server)
        arguments = (os.getpgrp(), self._child.environment, work, given)
        process = processes.Process(target=_do, args=arguments, daemon=True)
        process.start()
        try:
            for _ in range(round(s_max / 0.02)):
                if process.exitcode is not None or is_over():
                    break
                await asyncio.sleep(0.02)
        finally:
            process.kill()
            process.join()
        return process.exitcode == 0


def _do(
    group: int, environment: dict[str, str], work: Callable[..., object], given: tuple[Any, ...]
) -> None:
    """Runs in the process, in the group of the requesting process."""
    os.setpgid(0, group)
    if environment:
        ctypes.CDLL(None).torture_attach(os.fsencode(environment[CONTROL]))
    try:
        work(*given)
    except (PolybusError, OSError):
        # Its disk fails, or the bus does not run yet, or has not made the topic.
        os._exit(1)
