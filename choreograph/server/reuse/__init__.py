"""Reuse of messages and quotes in a server's traffic."""
