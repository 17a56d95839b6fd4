"""The load on a bus while faults happen, and the ledger of its promises."""
