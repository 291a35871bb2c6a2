"""Campaigns that try to break the promises of the package: `python -m benchmarks.torture`."""
