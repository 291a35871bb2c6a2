"""Admission of requests and the step loop."""
