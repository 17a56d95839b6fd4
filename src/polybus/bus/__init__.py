"""The bus: topics, subscriptions and receipts. Synchronous, single-writer, no I/O."""
