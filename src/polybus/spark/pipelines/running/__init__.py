"""Running flows: the driver process, one-off runs, and what both report."""
