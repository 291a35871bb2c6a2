"""Handles of messages, and copies of their keys and values."""
