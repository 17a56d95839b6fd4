"""What a bus does while faults happen, and what it promised to whom."""
