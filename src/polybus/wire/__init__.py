"""Wire protocols: bytes to events and batches and back. No socket, loop, clock or thread here."""
