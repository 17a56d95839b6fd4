"""Sessions: durable inboxes for msgstream clients."""
