"""Profiles of layers that other models may reuse."""
