"""TCP: connections, their layers, their outboxes, the bounds they share, and the pump."""

# First: with POLYBUS_PURE=1 it lets the source of compiled modules be imported.
import polybus.scan  # noqa: F401
