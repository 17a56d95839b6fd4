"""`polybus torture`: injects faults into a real bus, and checks its promises."""
