"""For tests, yours too: a whole bus on a free port, peers that speak bytes, clocks, bad disks."""

from polybus.testing.bus import run_bus
from polybus.testing.clock import ManualClock
from polybus.testing.peer import ScriptedPeer

__all__ = ["ManualClock", "ScriptedPeer", "run_bus"]
