"""Repair of reused keys and values."""
