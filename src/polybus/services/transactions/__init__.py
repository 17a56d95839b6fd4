"""Transactions: staged messages of many topics, published together and once."""
