"""Proxy in front of vLLM that finds quotes."""
