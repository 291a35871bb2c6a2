"""Requests, and the state of a decode."""
