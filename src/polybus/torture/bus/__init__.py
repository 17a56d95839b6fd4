"""A bus under test: its process, and what stands between it and its disk and clock."""
