"""For tests, also your own: a bus on a free port, raw peers, a manual clock, a faulty disk."""

from polybus.testing.bus import run_bus
from polybus.testing.clock import ManualClock
from polybus.testing.peer import ScriptedPeer

__all__ = ["ManualClock", "ScriptedPeer", "run_bus"]
