"""Inference engine: scheduling, execution, sampling and the session API."""
