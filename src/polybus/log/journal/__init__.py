"""The journal: the shared, fsynced front of all topics' logs."""
