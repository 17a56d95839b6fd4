"""The journal: the shared, fsynced front of all topics' logs."""

# First: with POLYBUS_PURE=1 it lets the source of compiled modules be imported.
import polybus.scan  # noqa: F401
