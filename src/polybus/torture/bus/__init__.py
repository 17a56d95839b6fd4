"""A bus under test: its process, and the shim between it and its disk and clock."""
