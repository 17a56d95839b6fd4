"""The faults of a campaign, in rounds."""
