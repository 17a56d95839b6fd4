"""Accounts: who may log in, and what each may do with which topics."""
