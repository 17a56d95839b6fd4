"""TCP: connections, their layers, their outboxes and the bounds they share."""
