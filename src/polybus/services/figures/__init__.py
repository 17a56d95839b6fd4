"""Figures of the bus over time: rates, bytes, lags and senders."""
