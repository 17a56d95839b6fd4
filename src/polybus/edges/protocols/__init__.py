"""One translator per protocol: its events become bus calls, the bus's calls its bytes."""
