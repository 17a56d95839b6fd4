"""Pipelines that users declare: loading, checking and preparing their flows."""
