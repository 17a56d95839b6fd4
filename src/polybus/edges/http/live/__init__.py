"""`/v1/live`: figures and tails for pages, over one WebSocket each."""
