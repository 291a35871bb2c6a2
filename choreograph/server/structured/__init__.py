"""Structured outputs and tool calls."""
